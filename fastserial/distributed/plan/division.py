"""Which rank writes which blocks of the file: those that it holds first, else equally many each.

The file is cut at multiples of `GRAIN`, so that no page is written by two ranks. What one writer
has it writes. `balance` divides the rest: what lies between the parts of several ranks, and what no
writer has.

Of replicas, one is taken for each tensor, as a whole: ranks whose replicas differ unnoticed must
not make a tensor of rows of both. Only if all bytes of the replicas were compared are they divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import lcm
from typing import NamedTuple

from fastserial.distributed.plan.balance import Workload, assign
from fastserial.distributed.sharding.boxes import Box, boxes_of_range, run_of, span_of
from fastserial.distributed.sharding.pieces import Flat, Mesh, TensorSpec, boxes_at

# Bytes. Larger, more edges of shards travel; smaller, writes get shorter.
GRAIN = 64 * 1024


class FilePlan(NamedTuple):
    """The file, as rank 0 sends it to all ranks.

    Attributes:
        nbytes: its size.
        records: those with data, in file order: number, source, offset in the file, bytes. A
            source below 0 is one that rank 0 alone has.
        writers: the ranks that write, in order.
        checksums: whether the file has CRC-32s.
        cuts_replicas: whether what several ranks have was compared in whole, and may be divided
            among them.
    """

    nbytes: int
    records: list[tuple[int, int, int, int]]
    writers: list[int]
    checksums: bool = True
    cuts_replicas: bool = False

    def cover(self, source: int, spec: TensorSpec, size: int) -> Cover:
        """Return which ranks hold what of a tensor, as far as they may write it.

        Args:
            source: its number: replicas of consecutive tensors are taken from different ranks.
            size: of the group.
        """
        if self.cuts_replicas and not isinstance(spec.held, Flat):  # these are not compared
            return cover_of(spec.shape, spec.held, size)
        # What rows of one tensor are taken from must not depend on who writes.
        able = tuple(self.writers) if spec.held is None else ()
        replica = source % lcm(size, len(self.writers))  # few different ones: covers are kept
        return cover_of(spec.shape, spec.held, size, replica, able)


class HeldBox(NamedTuple):
    """A box and the ranks that hold it, each the same bytes.

    Attributes:
        first, stop: the row-major elements from its first to its last.
    """

    box: Box
    ranks: tuple[int, ...]
    first: int
    stop: int


class Segment(NamedTuple):
    """Consecutive elements, bytes or blocks [first, stop), and the ranks that have some of them.

    Attributes:
        as_stored: each of the ranks has all of them, in the order of the file.
    """

    first: int
    stop: int
    ranks: tuple[int, ...]
    as_stored: bool = True


class Cover(NamedTuple):
    """A tensor as all ranks hold it: disjoint boxes, and the segments that they make, in order."""

    held: tuple[HeldBox, ...]
    segments: tuple[Segment, ...]


@lru_cache(maxsize=8192)
def cover_of(
    shape: tuple[int, ...],
    holders: Mesh | Flat | None,
    size: int,
    replica: int | None = None,
    writers: tuple[int, ...] = (),
) -> Cover:
    """Return which ranks hold what of a tensor in a group of `size` ranks (`TensorSpec.held`).

    Args:
        replica: of what several ranks have, only one is named: the one of this number, counted
            round. Along a mesh it is the same replica for all boxes. None: all are named.
        writers: of the ranks that have something, one of these is named, if there is one.

    Raises:
        ValueError: nobody holds some of it.
    """

    def named(ranks: Sequence[int]) -> list[int]:
        """Return which of the ranks that have something are named."""
        if replica is None:
            return list(ranks)
        able = [rank for rank in ranks if rank in writers] or list(ranks)
        return [able[replica % len(able)]]

    whole = Box((0,) * len(shape), shape)
    segments: list[Segment] | None = None
    if isinstance(holders, Flat):
        segments = [
            segment._replace(ranks=tuple(named(segment.ranks)))
            for segment in _segments_of_ranges(holders)
        ]
    boxes: dict[Box, list[int]] = {}
    for first, stop, ranks, _ in segments or ():
        boxes |= {box: list(ranks) for box in boxes_of_range(shape, first, stop)}
    if isinstance(holders, Mesh):
        mesh, placed = holders._replace(grids=()), set()
        for grid in holders.grids:
            for index, rank in enumerate(grid):
                if rank >= 0 and rank not in placed:
                    placed.add(rank)
                    for box in boxes_at(shape, mesh, index):
                        boxes.setdefault(box, []).append(rank)
    elif holders is None and whole.numel:
        boxes[whole] = list(range(size))
    if sum(box.numel for box in boxes) != whole.numel:
        raise ValueError("the shards of all ranks do not make the whole tensor")
    held = [
        HeldBox(box, tuple(sorted(named(some))), *span_of(shape, box))
        for box, some in boxes.items()
    ]
    return Cover(tuple(held), tuple(segments or _segments_of_boxes(shape, held)))


def _segments_of_ranges(flat: Flat) -> list[Segment]:
    """Return disjoint ranges with all ranks that hold them."""
    ends: dict[int, list[int]] = {}
    for index, (_, first, stop) in enumerate(flat.ranges):
        ends.setdefault(first, []).append(index)
        ends.setdefault(stop, []).append(index)
    found = []
    inside: set[int] = set()
    for first, stop in pairwise(sorted(ends)):
        inside.symmetric_difference_update(ends[first])
        if inside:
            ranks = {flat.ranges[index][0] for index in inside}
            found.append(Segment(first, stop, tuple(sorted(ranks))))
    return found


def _segments_of_boxes(shape: Sequence[int], held: Sequence[HeldBox]) -> list[Segment]:
    """Return the consecutive elements that boxes are.

    As one, and not as stored: boxes in each other's gaps, and boxes of the same ranks side by side,
    which may lie elsewhere in memory.
    """
    found: list[Segment] = []
    for box, ranks, first, stop in sorted(held, key=lambda one: one.first):
        segment = Segment(first, stop, ranks, run_of(shape, box) is not None)
        last = found[-1] if found else Segment(0, 0, ())
        if first < last.stop or (first == last.stop and ranks == last.ranks):
            found.pop()
            both = tuple(sorted({*last.ranks, *ranks}))
            segment = Segment(last.first, max(last.stop, stop), both, False)
        found.append(segment)
    return found


class OwnedRange(NamedTuple):
    """Bytes [first, stop) of the file, in whole blocks, and the rank that writes them.

    Attributes:
        ranks: that have parts of them; none if the owner has all of them as they are in the file.
    """

    first: int
    stop: int
    owner: int
    ranks: tuple[int, ...]


def owned_ranges(plan: FilePlan, specs: Sequence[TensorSpec], size: int) -> list[OwnedRange]:
    """Return which rank writes what, in file order: the same on every rank.

    Args:
        specs: of the sources.
        size: of the group.

    Raises:
        ValueError: nobody holds some of a tensor.
    """
    writers = tuple(plan.writers)
    load = [0] * size  # bytes of what each rank alone has
    found: list[OwnedRange] = []
    items: list[Segment] = []
    work: list[Workload] = []

    def own(first: int, stop: int, owner: int, ranks: tuple[int, ...]) -> None:
        end = min(stop * GRAIN, plan.nbytes)
        found.append(OwnedRange(first * GRAIN, end, owner, ranks))

    for first, stop, ranks, as_stored in _blocks(_segments_of_file(plan, specs, size)):
        owners = ranks if len(writers) == size else tuple([r for r in ranks if r in writers])
        if len(owners) == 1:
            load[owners[0]] += (stop - first) * GRAIN
            own(first, stop, owners[0], () if as_stored else ranks)
        else:
            items.append(Segment(first, stop, ranks, as_stored and bool(owners)))
            work.append(Workload((stop - first) * GRAIN, owners or writers, stop - first))
    for number, owner, begin, end in assign(work, size, load):
        first, _, ranks, as_stored = items[number]
        own(first + begin, first + end, owner, () if as_stored else ranks)
    return sorted(found)


def _segments_of_file(plan: FilePlan, specs: Sequence[TensorSpec], size: int) -> Iterator[Segment]:
    """Yield the bytes of a file up to the end of its last block, with the ranks that have them."""
    at = 0
    for _, source, offset, length in plan.records:
        yield Segment(at, offset, (0,))
        at = offset + length
        if source < 0:
            yield Segment(offset, at, (0,))
            continue
        spec = specs[source]
        item = spec.dtype.itemsize
        for first, stop, ranks, as_stored in plan.cover(source, spec, size).segments:
            yield Segment(offset + first * item, offset + stop * item, ranks, as_stored)
    yield Segment(at, plan.nbytes + -plan.nbytes % GRAIN, (0,))


def _joined(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Yield segments in their order; as one, those that one rank has side by side."""
    last = Segment(0, 0, ())
    for segment in segments:
        if segment.first == segment.stop:
            continue
        both = segment.as_stored and last.as_stored
        if both and segment.ranks == last.ranks and len(last.ranks) == 1:
            last = last._replace(stop=segment.stop)
            continue
        yield last
        last = segment
    yield last


def _blocks(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Yield the blocks of a file in their order: those within one segment, and those between."""
    done = blocks = 0
    near: set[int] = set()  # ranks that have parts of the blocks from `done` on
    for begin, end, ranks, as_stored in _joined(segments):
        first, stop = _whole_blocks(begin, end)
        blocks = stop
        if begin < first * GRAIN or first >= stop:
            near.update(ranks)
        if first >= stop:
            continue
        if done < first:
            yield Segment(done, first, tuple(sorted(near)), False)
        yield Segment(first, stop, ranks, as_stored)
        done = stop
        near = set(ranks) if stop * GRAIN < end else set()
    if done < blocks:
        yield Segment(done, blocks, tuple(sorted(near)), False)


def _whole_blocks(first: int, stop: int) -> tuple[int, int]:
    """Return the blocks, from the first on up to the second, that lie in bytes [first, stop)."""
    return -(-first // GRAIN), stop // GRAIN
