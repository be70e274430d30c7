"""From extents to blocks: which reads fetch what is wanted of a file.

The file is cut at multiples of the block size. What is wanted of such a window is read directly
into a staging buffer and copied to its places, or, if it is in the page cache, straight to its
places. Where memory and file happen to be aligned alike, direct reads go straight, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from fastserial.config.performance import NEAR_EXTENTS, STRAIGHT_PIECE
from fastserial.loading.block_reader import Block
from fastserial.loading.sinks import HostSink, ReadExtent, Sink
from fastserial.memory.buffers import host_buffer

__all__ = ["plan_blocks"]


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
    extents: Iterable[ReadExtent],
    *,
    block_size: int,
    alignment: int,
    file_size: int,
    straight: bool,
    goes_direct: Callable[[int, int], bool],
) -> Iterator[tuple[Block, bool]]:
    """Yield blocks that fetch the extents, each with whether it is to be read directly.

    Args:
        extents: what is wanted, in any order, all inside the file.
        block_size: bytes of the largest block; a multiple of `alignment`.
        alignment: of offset, length and memory of direct reads (bytes).
        file_size: bytes of the file.
        straight: blocks may have memory of their own.
        goes_direct: whether (offset, length) is to be read directly.
    """
    for window in _windows(extents, block_size):
        for run in _runs(window):
            first, last = run[0].offset, run[-1].end
            if goes_direct(first, last - first):
                yield from _direct(run, alignment, file_size, straight)
            else:
                yield from _cached(run, straight)


def _windows(extents: Iterable[ReadExtent], size: int) -> Iterator[list[_Piece]]:
    """Yield the pieces in each window of `size` bytes, in file order."""
    window: list[_Piece] = []
    for extent in sorted(extents, key=lambda extent: extent.offset):
        at, end = extent.offset, extent.offset + extent.length
        while at < end:
            stop = min(end, at - at % size + size)
            if window and window[0].offset // size != at // size:
                yield window
                window = []
            window.append(_Piece(at, stop - at, extent.sink, at - extent.offset))
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


def _direct(
    run: list[_Piece], alignment: int, file_size: int, straight: bool
) -> Iterator[tuple[Block, bool]]:
    first, last = run[0].offset, max(piece.end for piece in run)
    sink = run[0].sink
    if straight and len(run) == 1 and isinstance(sink, HostSink):
        address = sink.address + run[0].start
        if not (first | address) % alignment and (
            not run[0].length % alignment or last == file_size
        ):
            yield _straight_block(run[0], sink), True
            return
    start = first - first % alignment
    stop = min(file_size, last + -last % alignment)
    yield Block(start, stop - start, partial(_scatter, run, start)), True


def _cached(run: list[_Piece], straight: bool) -> Iterator[tuple[Block, bool]]:
    together: list[_Piece] = []
    for piece in run:
        if straight and piece.length >= STRAIGHT_PIECE and isinstance(piece.sink, HostSink):
            if together:
                yield _staged(together), False
                together = []
            yield _straight_block(piece, piece.sink), False
        else:
            together.append(piece)
    if together:
        yield _staged(together), False


def _staged(run: list[_Piece]) -> Block:
    start, stop = run[0].offset, max(piece.end for piece in run)
    return Block(start, stop - start, partial(_scatter, run, start))


def _straight_block(piece: _Piece, sink: HostSink) -> Block:
    buffer = host_buffer(sink.address + piece.start, piece.length)
    return Block(piece.offset, piece.length, partial(_scatter, [piece], piece.offset), buffer)


def _scatter(pieces: list[_Piece], begin: int, view: memoryview, address: int) -> None:
    """Deliver a block, which begins at byte `begin` of the file: hand each piece to its sink."""
    for offset, length, sink, start in pieces:
        at = offset - begin
        sink.deliver(view[at : at + length], address + at, start)
