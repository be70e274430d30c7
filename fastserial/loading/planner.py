"""From reads to blocks: the one place where what is wanted of a file is cut and put together.

Reads are cut at multiples of a range size, and what lies near each other within such a range is
read together: two limits, as in pyarrow's `CacheOptions` (range size, hole size). How a range is
read, `loading.policy` says. Then

- through the page cache, one call puts the pieces of a range each in its memory;
- directly, only aligned bytes move: what lies in memory as it does in the file, modulo the
  alignment, is read where it belongs, the rest comes to a staging buffer and is copied;
- what goes to a device passes through a staging buffer, or past the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from fastserial.config.performance import IN_PLACE, MOST_PIECES, NEAR_EXTENTS, STRAIGHT_PIECE
from fastserial.loading.pump import (
    STAGED,
    Block,
    InMemory,
    InPieces,
    Into,
    OnDevice,
    Pump,
)
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

    def part(self, first: int, stop: int) -> _Piece:
        """Return what of it lies at [first, stop) of the file."""
        return _Piece(first, stop - first, self.sink, self.start + first - self.offset)


def plan_blocks(reads: Iterable[ReadExtent], pump: Pump) -> Iterator[Block]:
    """Yield blocks that fetch the reads, about in the order of the file.

    Args:
        reads: what is wanted, in any order, all inside the file.
        pump: what is to read them.
    """
    pieces = [_Piece(read.offset, read.length, read.sink, 0) for read in reads]
    pieces.sort(key=attrgetter("offset"))
    for run in _coalesced(pieces, pump.range_size):
        first, stop = run[0].offset, _end(run)
        if (block := _past_the_host(run, pump)) is not None:
            yield block
        elif pump.policy.goes_direct(first, stop - first):
            yield from _direct(run, pump)
        elif pump.takes_any_memory and pump.ring is None and (blocks := _scattered(run)):
            yield from blocks
        else:
            yield from _cached(run, pump)


def _coalesced(pieces: Iterable[_Piece], size: int) -> Iterator[list[_Piece]]:
    """Yield pieces in runs that are read together, in the order of the file.

    Args:
        pieces: in that order.
        size: bytes of the ranges of which no run spans two.
    """
    run: list[_Piece] = []
    number = end = 0
    for piece in pieces:
        at, last = piece.offset, piece.offset + piece.length
        while at < last:
            if run and (at // size != number or at - end > NEAR_EXTENTS):
                yield run
                run = []
            if not run:
                number, end = at // size, at
            stop = min(last, number * size + size)
            run.append(piece if stop - at == piece.length else piece.part(at, stop))
            end = max(end, stop)
            at = stop
    if run:
        yield run


def _end(run: Sequence[_Piece]) -> int:
    return max(piece.end for piece in run)


# -- past the host ---------------------------------------------------------------------------------


def _past_the_host(run: Sequence[_Piece], pump: Pump) -> Block | None:
    """Return the block that a device gets without the host; None: it is none."""
    piece, sink = run[0], run[0].sink
    if len(run) > 1 or not isinstance(sink, DeviceSink):
        return None
    if not pump.policy.goes_past_the_host(sink.device, piece.offset, piece.length):
        return None
    return _block(run, piece.offset, piece.end, OnDevice(sink.part(piece.start, piece.length)))


# -- directly --------------------------------------------------------------------------------------


def _direct(run: Sequence[_Piece], pump: Pump) -> Iterator[Block]:
    alignment = pump.policy.alignment
    rest: list[_Piece] = []
    for piece in run:
        found = _aligned(piece, alignment, pump.size) if pump.takes_any_memory else None
        if found is None:
            rest.append(piece)
            continue
        at, memory = found
        inner = piece.part(max(piece.offset, at.offset), min(piece.end, at.end))
        yield _block([inner], at.offset, at.end, InMemory(memory), direct=True)
        edges = piece.part(piece.offset, inner.offset), piece.part(inner.end, piece.end)
        rest += [edge for edge in edges if edge.length]
    for near in _coalesced(rest, pump.block_size):
        start = near[0].offset - near[0].offset % alignment
        end = _end(near)
        yield _block(near, start, min(pump.size, end + -end % alignment), direct=True)


def _aligned(piece: _Piece, alignment: int, size: int) -> tuple[_Piece, Buffer] | None:
    """Return what direct I/O can read to a piece's memory, None: little, or nothing.

    That is all of the piece, with more around it if there is memory for that, or what lies inside.
    """
    first, end = piece.offset, piece.end
    inner = first + -first % alignment, end - end % alignment
    outer = first - first % alignment, min(size, end + -end % alignment)
    for start, stop in (outer, inner):
        if stop - start < IN_PLACE:
            continue
        part = piece.part(start, stop)
        memory = part.sink.place(part.start, part.length)
        if memory is not None and not memory.address % alignment:
            return part, memory
    return None


# -- through the page cache ------------------------------------------------------------------------


def _scattered(run: Sequence[_Piece]) -> list[Block]:
    """Return blocks whose pieces are each read to its memory; none if that cannot be."""
    blocks: list[Block] = []
    for number in range(0, len(run), MOST_PIECES // 2):
        pieces = run[number : number + MOST_PIECES // 2]
        views: list[memoryview] = []
        places: list[Buffer] = []
        first = end = pieces[0].offset
        for piece in pieces:
            offset, length, sink, start = piece
            place = sink.place(start, length)
            if offset < end or (place is None and length >= STRAIGHT_PIECE):
                return []  # wanted twice, or worth no memory of its own
            if place is None:
                place = own_buffer(length)
            if offset > end:
                views.append(_UNWANTED[: offset - end])
            views.append(place.view)
            places.append(place)
            end = offset + length
        deliver = partial(_deliver_places, pieces, places)
        blocks.append(Block(first, end - first, deliver, InPieces(views)))
    return blocks


def _cached(run: Sequence[_Piece], pump: Pump) -> Iterator[Block]:
    """Yield blocks of which each is read to one piece's memory or to a staging buffer."""
    for part in _coalesced(run, pump.block_size):
        together: list[_Piece] = []
        for piece in part:
            large = pump.takes_any_memory and piece.length >= STRAIGHT_PIECE
            place = piece.sink.place(piece.start, piece.length) if large else None
            if place is None:
                together.append(piece)
                continue
            if together:
                yield _block(together, together[0].offset, _end(together))
                together = []
            yield _block([piece], piece.offset, piece.end, InMemory(place))
        if together:
            yield _block(together, together[0].offset, _end(together))


# -- delivery --------------------------------------------------------------------------------------


def _block(
    pieces: Sequence[_Piece], start: int, stop: int, into: Into = STAGED, direct: bool = False
) -> Block:
    return Block(start, stop - start, partial(_deliver, pieces, start), into, direct)


def _deliver(pieces: Sequence[_Piece], begin: int, view: memoryview, address: int) -> None:
    """Deliver a block, which begins at byte `begin` of the file, to the sinks of its pieces."""
    for offset, length, sink, start in pieces:
        at = offset - begin
        sink.deliver(view[at : at + length], address + at, start)


def _deliver_places(
    pieces: Sequence[_Piece], places: Sequence[Buffer], _: memoryview, __: int
) -> None:
    """Deliver a scattered block: the sinks see what came to their memory."""
    for piece, place in zip(pieces, places, strict=True):
        piece.sink.deliver(place.view, place.address, piece.start)
