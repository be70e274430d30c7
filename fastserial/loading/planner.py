"""From reads to blocks: the only module that cuts and coalesces reads of a file.

Reads are cut at multiples of a range size, and neighbouring reads within such a range are joined:
two limits, as in pyarrow's `CacheOptions` (range size, hole size). `loading.policy` decides how a
range is read:

- Through the page cache, one call reads the parts of a range into their final memory.
- Direct I/O moves aligned blocks only. Bytes with the same offset in memory as in the file, modulo
  the alignment, are read in place; others arrive in a staging buffer and are copied.
- Bytes for a device pass through a staging buffer, or take the device path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import cast

from fastserial.config.performance import IN_PLACE, MOST_PIECES, NEAR_EXTENTS, UNSTAGED
from fastserial.loading.pump import Block, Pump, Target
from fastserial.loading.sinks import DeviceSink, ReadExtent
from fastserial.memory.buffers import Buffer, own_buffer

_UNWANTED = memoryview(bytearray(NEAR_EXTENTS))  # any thread writes here, nobody reads


def plan_blocks(reads: Iterable[ReadExtent], pump: Pump) -> Iterator[Block]:
    """Yield blocks that fetch the reads, about in the order of the file.

    Args:
        reads: in any order, all inside the file.
        pump: reads the blocks.
    """
    for run in _coalesced(sorted(reads, key=attrgetter("offset")), pump.range_size):
        first, stop = run[0].offset, _end(run)
        if (block := _on_device_path(run, pump)) is not None:
            yield block
        elif pump.policy.reads_directly(first, stop - first):
            yield from _direct(run, pump)
        else:
            yield from _cached(run, pump)


def _coalesced(parts: Iterable[ReadExtent], size: int) -> Iterator[list[ReadExtent]]:
    """Yield runs of parts that are read together, in the order of the file.

    Args:
        parts: in that order.
        size: bytes of the ranges of which no run spans two.
    """
    run: list[ReadExtent] = []
    number = end = 0
    for part in parts:
        at, last = part.offset, part.offset + part.length
        while at < last:
            if run and (at // size != number or at - end > NEAR_EXTENTS):
                yield run
                run = []
            if not run:
                number, end = at // size, at
            stop = min(last, number * size + size)
            run.append(part if stop - at == part.length else part.part(at, stop))
            end = max(end, stop)
            at = stop
    if run:
        yield run


def _end(run: Sequence[ReadExtent]) -> int:
    return max(part.end for part in run)


# -- the device path -------------------------------------------------------------------------------


def _on_device_path(run: Sequence[ReadExtent], pump: Pump) -> Block | None:
    """Return the block that is read to a device without the host, None if it is not."""
    part, sink = run[0], run[0].sink
    if len(run) > 1 or not isinstance(sink, DeviceSink):
        return None
    if not pump.policy.takes_device_path(sink.device, part.offset, part.length):
        return None
    return _block(run, part.offset, part.end, sink.part(part.start, part.length))


# -- directly --------------------------------------------------------------------------------------


def _direct(run: Sequence[ReadExtent], pump: Pump) -> Iterator[Block]:
    alignment = pump.policy.alignment
    rest: list[ReadExtent] = []
    for part in run:
        found = _aligned(part, alignment, pump.size) if pump.takes_any_memory else None
        if found is None:
            rest.append(part)
            continue
        at, memory = found
        inner = part.part(max(part.offset, at.offset), min(part.end, at.end))
        yield _block([inner], at.offset, at.end, memory, direct=True)
        edges = part.part(part.offset, inner.offset), part.part(inner.end, part.end)
        rest += [edge for edge in edges if edge.length]
    rest.sort(key=attrgetter("offset"))  # overlapping reads may put an edge out of order
    for near in _coalesced(rest, pump.block_size):
        start = near[0].offset - near[0].offset % alignment
        end = _end(near)
        yield _block(near, start, min(pump.size, end + -end % alignment), direct=True)


def _aligned(part: ReadExtent, alignment: int, size: int) -> tuple[ReadExtent, Buffer] | None:
    """Return what direct I/O can read to a part's memory; None: nothing, or too little.

    That is the whole part, with the bytes around it if there is memory for them, or its inside.
    """
    first, end = part.offset, part.end
    inner = first + -first % alignment, end - end % alignment
    outer = first - first % alignment, min(size, end + -end % alignment)
    for start, stop in (outer, inner):
        if stop - start < IN_PLACE:
            continue
        aligned = part.part(start, stop)
        memory = aligned.sink.memory_for(aligned.start, aligned.length)
        if memory is not None and not memory.address % alignment:
            return aligned, memory
    return None


# -- through the page cache ------------------------------------------------------------------------


def _cached(run: Sequence[ReadExtent], pump: Pump) -> Iterator[Block]:
    targets = ((part, _memory_for(part, pump)) for part in run)
    for staged, group in groupby(targets, key=lambda one: one[1] is None):
        if not staged:
            yield from _scattered(cast("Iterator[tuple[ReadExtent, Buffer]]", group))
            continue
        for near in _coalesced((part for part, _ in group), pump.block_size):
            yield _block(near, near[0].offset, _end(near))


def _memory_for(part: ReadExtent, pump: Pump) -> Buffer | None:
    """Return the memory to read a part into; None: it shares a staging buffer with others."""
    large = part.length >= UNSTAGED
    if not pump.takes_any_memory or (pump.ring is not None and not large):
        return None
    memory = part.sink.memory_for(part.start, part.length)
    return own_buffer(part.length) if memory is None and not large else memory


def _scattered(targets: Iterable[tuple[ReadExtent, Buffer]]) -> Iterator[Block]:
    """Yield blocks; each reads neighbouring parts with one call, into the memory of each."""
    parts: list[ReadExtent] = []
    buffers: list[Buffer] = []
    views: list[memoryview] = []
    end = 0

    def block() -> Block:
        deliver = partial(_deliver_scattered, parts, buffers)
        return Block(parts[0].offset, end - parts[0].offset, deliver, views)

    for part, buffer in targets:
        hole = part.offset - end
        if parts and (not 0 <= hole <= NEAR_EXTENTS or len(views) + 2 > MOST_PIECES):
            yield block()
            parts, buffers, views = [], [], []
        if parts and hole:
            views.append(_UNWANTED[:hole])
        views.append(buffer.view)
        parts.append(part)
        buffers.append(buffer)
        end = part.end
    yield block()


# -- delivery --------------------------------------------------------------------------------------


def _block(
    parts: Sequence[ReadExtent], start: int, stop: int, target: Target = None, direct: bool = False
) -> Block:
    return Block(start, stop - start, partial(_deliver, parts, start), target, direct)


def _deliver(parts: Sequence[ReadExtent], begin: int, view: memoryview, address: int) -> None:
    """Deliver a block, which begins at byte `begin` of the file, to the sinks of its parts."""
    for offset, length, sink, start in parts:
        at = offset - begin
        sink.deliver(view[at : at + length], address + at, start)


def _deliver_scattered(
    parts: Sequence[ReadExtent], buffers: Sequence[Buffer], _: memoryview, __: int
) -> None:
    """Deliver a scattered block: each sink gets the bytes that arrived in its memory."""
    for part, buffer in zip(parts, buffers, strict=True):
        part.sink.deliver(buffer.view, buffer.address, part.start)
