"""From extents to blocks: which reads fetch what is wanted of a file.

The file is cut at multiples of the block size. What is wanted of such a window is read directly
into a staging buffer and copied to its places, or through the page cache straight to its places.
Where memory and file happen to be aligned alike, direct reads go straight, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from fastserial.config.performance import MOST_PIECES, NEAR_EXTENTS, STRAIGHT_PIECE
from fastserial.loading.block_reader import Block, BlockReader
from fastserial.loading.sinks import DeviceSink, ReadExtent, Sink
from fastserial.memory.buffers import Buffer, own_buffer

__all__ = ["plan_blocks"]

_UNWANTED = memoryview(bytearray(NEAR_EXTENTS))  # any thread writes here, nobody reads


class _Piece(NamedTuple):
    """`length` bytes at `offset` of the file: those of `sink` from `start` on."""

    offset: int
    length: int
    sink: Sink
    start: int

    @property
    def end(self) -> int:
        return self.offset + self.length


def plan_blocks(
    extents: Iterable[ReadExtent], blocks: BlockReader, block_size: int, file_size: int
) -> Iterator[Block]:
    """Yield blocks that fetch the extents, in the order of the file.

    Args:
        extents: what is wanted, in any order, all inside the file.
        blocks: what is to read them.
        block_size: bytes of a staging buffer; a multiple of the alignment of direct reads.
        file_size: bytes of the file.
    """
    alignment, straight = blocks.alignment, blocks.takes_any_memory
    pieces = [_Piece(extent.offset, extent.length, extent.sink, 0) for extent in extents]
    pieces.sort(key=attrgetter("offset"))
    for window in _windows(pieces, blocks.best_size):
        for run in _runs(window):
            first, last = run[0].offset, max(piece.end for piece in run)
            if (block := _past_the_host(run, blocks)) is not None:
                yield block
            elif blocks.goes_direct(first, last - first):
                yield _direct(run, alignment, file_size, straight)
            elif straight and blocks.ring is None and (block := _scattered(run)) is not None:
                yield block
            else:
                for part in _windows(run, block_size):
                    yield from _cached(part, straight)


def _windows(pieces: Iterable[_Piece], size: int) -> Iterator[list[_Piece]]:
    """Yield the pieces in each window of `size` bytes, in file order."""
    window: list[_Piece] = []
    for piece in pieces:
        at, end = piece.offset, piece.end
        while at < end:
            stop = min(end, at - at % size + size)
            if window and window[0].offset // size != at // size:
                yield window
                window = []
            window.append(_Piece(at, stop - at, piece.sink, piece.start + at - piece.offset))
            at = stop
    if window:
        yield window


def _runs(window: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Yield the pieces of a window in groups that are near each other."""
    run: list[_Piece] = []
    end = 0
    for piece in window:
        if run and piece.offset - end > NEAR_EXTENTS:
            yield run
            run = []
        run.append(piece)
        end = max(end, piece.end)
    if run:
        yield run


def _past_the_host(run: list[_Piece], blocks: BlockReader) -> Block | None:
    """Return the block that a device gets without the host; None: it is none."""
    piece, sink = run[0], run[0].sink
    if len(run) > 1 or not isinstance(sink, DeviceSink):
        return None
    if not blocks.goes_straight(sink.device, piece.offset, piece.length):
        return None
    deliver = partial(_scatter, run, piece.offset)
    target = sink.part(piece.start, piece.length)
    return Block(piece.offset, piece.length, deliver, direct=False, device=target)


def _direct(run: list[_Piece], alignment: int, file_size: int, straight: bool) -> Block:
    first, last = run[0].offset, max(piece.end for piece in run)
    place = run[0].sink.place(run[0].start, run[0].length) if straight and len(run) == 1 else None
    if (
        place is not None
        and not (first | place.address) % alignment
        and (not run[0].length % alignment or last == file_size)
    ):
        return _straight(run[0], place, True)
    start = first - first % alignment
    stop = min(file_size, last + -last % alignment)
    return Block(start, stop - start, partial(_scatter, run, start), direct=True)


def _scattered(run: list[_Piece]) -> Block | None:
    """Return one block whose bytes go straight to their places; None if that cannot be."""
    if 2 * len(run) > MOST_PIECES:
        return None
    memory: list[memoryview] = []
    places: list[Buffer] = []
    at = start = run[0].offset
    for piece in run:
        place = piece.sink.place(piece.start, piece.length)
        if piece.offset < at or (place is None and piece.length >= STRAIGHT_PIECE):
            return None
        if place is None:
            place = own_buffer(piece.length)
        if piece.offset > at:
            memory.append(_UNWANTED[: piece.offset - at])
        memory.append(place.view)
        places.append(place)
        at = piece.end
    deliver = partial(_tell, run, places)
    return Block(start, at - start, deliver, direct=False, pieces=memory)


def _tell(run: list[_Piece], places: list[Buffer], _: memoryview, __: int) -> None:
    """Deliver a scattered block: the sinks see what came to their places."""
    for piece, place in zip(run, places, strict=True):
        piece.sink.deliver(place.view, place.address, piece.start)


def _cached(run: list[_Piece], straight: bool) -> Iterator[Block]:
    together: list[_Piece] = []
    for piece in run:
        place = piece.sink.place(piece.start, piece.length) if straight else None
        if place is not None and piece.length >= STRAIGHT_PIECE:
            if together:
                yield _staged(together)
                together = []
            yield _straight(piece, place, False)
        else:
            together.append(piece)
    if together:
        yield _staged(together)


def _staged(run: list[_Piece]) -> Block:
    start, stop = run[0].offset, max(piece.end for piece in run)
    return Block(start, stop - start, partial(_scatter, run, start), direct=False)


def _straight(piece: _Piece, place: Buffer, direct: bool) -> Block:
    deliver = partial(_scatter, [piece], piece.offset)
    return Block(piece.offset, piece.length, deliver, place, direct=direct)


def _scatter(pieces: list[_Piece], begin: int, view: memoryview, address: int) -> None:
    """Deliver a block, which begins at byte `begin` of the file: hand each piece to its sink."""
    for offset, length, sink, start in pieces:
        at = offset - begin
        sink.deliver(view[at : at + length], address + at, start)
