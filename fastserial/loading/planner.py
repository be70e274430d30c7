"""From reads to blocks: the only module that cuts and coalesces reads of a file.

Reads are cut at multiples of a range size, and what lies near each other within such a range is
read together: two limits, as in pyarrow's `CacheOptions` (range size, hole size). `loading.policy`
decides how a range is read:

- through the page cache, one call reads the parts of a range into their final memory;
- directly, only aligned bytes move: what has the same offset in memory as in the file, modulo the
  alignment, is read in place, the rest arrives in a staging buffer and is copied;
- what goes to a device passes through a staging buffer, or takes the device path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, cast

from fastserial.config.performance import IN_PLACE, MOST_PIECES, NEAR_EXTENTS, UNSTAGED
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


class _ReadPart(NamedTuple):
    """`length` bytes at `offset` of the file: those of `sink` from `start` on."""

    offset: int
    length: int
    sink: Sink
    start: int

    @property
    def end(self) -> int:
        return self.offset + self.length

    def part(self, first: int, stop: int) -> _ReadPart:
        """Return the part in range [first, stop) of the file."""
        return _ReadPart(first, stop - first, self.sink, self.start + first - self.offset)


def plan_blocks(reads: Iterable[ReadExtent], pump: Pump) -> Iterator[Block]:
    """Yield blocks that fetch the reads, about in the order of the file.

    Args:
        reads: what is wanted, in any order, all inside the file.
        pump: what is to read them.
    """
    pieces = [_ReadPart(read.offset, read.length, read.sink, 0) for read in reads]
    pieces.sort(key=attrgetter("offset"))
    for run in _coalesced(pieces, pump.range_size):
        first, stop = run[0].offset, _end(run)
        if (block := _on_device_path(run, pump)) is not None:
            yield block
        elif pump.policy.goes_direct(first, stop - first):
            yield from _direct(run, pump)
        else:
            yield from _cached(run, pump)


def _coalesced(pieces: Iterable[_ReadPart], size: int) -> Iterator[list[_ReadPart]]:
    """Yield pieces in runs that are read together, in the order of the file.

    Args:
        pieces: in that order.
        size: bytes of the ranges of which no run spans two.
    """
    run: list[_ReadPart] = []
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


def _end(run: Sequence[_ReadPart]) -> int:
    return max(piece.end for piece in run)


# -- the device path -------------------------------------------------------------------------------


def _on_device_path(run: Sequence[_ReadPart], pump: Pump) -> Block | None:
    """Return the block that is read to a device without the host, None if it is not."""
    piece, sink = run[0], run[0].sink
    if len(run) > 1 or not isinstance(sink, DeviceSink):
        return None
    if not pump.policy.takes_device_path(sink.device, piece.offset, piece.length):
        return None
    return _block(run, piece.offset, piece.end, OnDevice(sink.part(piece.start, piece.length)))


# -- directly --------------------------------------------------------------------------------------


def _direct(run: Sequence[_ReadPart], pump: Pump) -> Iterator[Block]:
    alignment = pump.policy.alignment
    rest: list[_ReadPart] = []
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
    rest.sort(key=attrgetter("offset"))  # overlapping reads may put an edge out of order
    for near in _coalesced(rest, pump.block_size):
        start = near[0].offset - near[0].offset % alignment
        end = _end(near)
        yield _block(near, start, min(pump.size, end + -end % alignment), direct=True)


def _aligned(piece: _ReadPart, alignment: int, size: int) -> tuple[_ReadPart, Buffer] | None:
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


def _cached(run: Sequence[_ReadPart], pump: Pump) -> Iterator[Block]:
    placed = ((piece, _memory_for(piece, pump)) for piece in run)
    for staged, group in groupby(placed, key=lambda one: one[1] is None):
        if not staged:
            yield from _scattered(cast("Iterator[tuple[_ReadPart, Buffer]]", group))
            continue
        for near in _coalesced((piece for piece, _ in group), pump.block_size):
            yield _block(near, near[0].offset, _end(near))


def _memory_for(piece: _ReadPart, pump: Pump) -> Buffer | None:
    """Return the memory to read a part to; None: it shares a staging buffer with others."""
    large = piece.length >= UNSTAGED
    if not pump.takes_any_memory or (pump.ring is not None and not large):
        return None
    place = piece.sink.place(piece.start, piece.length)
    return own_buffer(piece.length) if place is None and not large else place


def _scattered(placed: Iterable[tuple[_ReadPart, Buffer]]) -> Iterator[Block]:
    """Yield blocks of which each reads neighbours with one call, to the memory of each."""
    pieces: list[_ReadPart] = []
    places: list[Buffer] = []
    views: list[memoryview] = []
    end = 0

    def block() -> Block:
        deliver = partial(_deliver_places, pieces, places)
        return Block(pieces[0].offset, end - pieces[0].offset, deliver, InPieces(views))

    for piece, place in placed:
        hole = piece.offset - end
        if pieces and (not 0 <= hole <= NEAR_EXTENTS or len(views) + 2 > MOST_PIECES):
            yield block()
            pieces, places, views = [], [], []
        if pieces and hole:
            views.append(_UNWANTED[:hole])
        views.append(place.view)
        pieces.append(piece)
        places.append(place)
        end = piece.end
    yield block()


# -- delivery --------------------------------------------------------------------------------------


def _block(
    pieces: Sequence[_ReadPart], start: int, stop: int, into: Into = STAGED, direct: bool = False
) -> Block:
    return Block(start, stop - start, partial(_deliver, pieces, start), into, direct)


def _deliver(pieces: Sequence[_ReadPart], begin: int, view: memoryview, address: int) -> None:
    """Deliver a block, which begins at byte `begin` of the file, to the sinks of its pieces."""
    for offset, length, sink, start in pieces:
        at = offset - begin
        sink.deliver(view[at : at + length], address + at, start)


def _deliver_places(
    pieces: Sequence[_ReadPart], places: Sequence[Buffer], _: memoryview, __: int
) -> None:
    """Deliver a scattered block: the sinks get what arrived in their memory."""
    for piece, place in zip(pieces, places, strict=True):
        piece.sink.deliver(place.view, place.address, piece.start)
