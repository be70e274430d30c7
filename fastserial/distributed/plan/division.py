"""Which rank writes which blocks of the file: equally many each, those that it holds first.

The file is cut at multiples of `GRAIN`, so that no page is written by two ranks. A writer gets the
blocks that it alone holds, up to its share; blocks that several hold are divided among them. Then
a block between two ranks' blocks is given to one of them, and strided data to those that hold parts
of it. The rest is given to the ranks that have less than their share, in file order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from fastserial.distributed.sharding.boxes import Box, boxes_of_range, joined, run_of, span_of
from fastserial.distributed.sharding.pieces import Flat, Mesh, TensorSpec, boxes_at


class HeldBox(NamedTuple):
    """A box and the ranks that hold it, each the same bytes.

    Attributes:
        first, stop: the row-major elements from its first to its last.
    """

    box: Box
    ranks: tuple[int, ...]
    first: int
    stop: int


class HeldRange(NamedTuple):
    """Consecutive elements [first, stop) and some ranks."""

    first: int
    stop: int
    ranks: tuple[int, ...]


class Cover(NamedTuple):
    """A tensor as all ranks hold it.

    Attributes:
        held: disjoint boxes.
        runs: those of them that are consecutive elements, in their order, with the ranks that have
            all of it consecutively.
        parts: if there are none: elements of which each of the ranks has a part, and nobody else.
    """

    held: tuple[HeldBox, ...]
    runs: tuple[HeldRange, ...]
    parts: tuple[HeldRange, ...]


@lru_cache(maxsize=8192)
def cover_of(shape: tuple[int, ...], holders: Mesh | Flat | None, size: int) -> Cover:
    """Return which ranks hold what of a tensor in a group of `size` ranks (`TensorSpec.held`).

    Raises:
        ValueError: nobody holds some of it.
    """
    whole = Box((0,) * len(shape), shape)
    if isinstance(holders, Flat):
        runs = _sweep(holders)
        held = [
            _held(shape, box, run.ranks)
            for run in runs
            for box in boxes_of_range(shape, run.first, run.stop)
        ]
    else:
        boxes: dict[Box, list[int]] = {}
        if isinstance(holders, Mesh):
            mesh, placed = holders._replace(grids=()), set()
            for grid in holders.grids:
                for index, rank in enumerate(grid):
                    if rank >= 0 and rank not in placed:
                        placed.add(rank)
                        for box in boxes_at(shape, mesh, index):
                            boxes.setdefault(box, []).append(rank)
        elif whole.numel:
            boxes[whole] = list(range(size))
        held = [_held(shape, box, tuple(sorted(ranks))) for box, ranks in boxes.items()]
        runs = sorted(
            HeldRange(one.first, one.stop, one.ranks)
            for one in held
            if run_of(shape, one.box) is not None
        )
    if sum(one.box.numel for one in held) != whole.numel:
        raise ValueError("the shards of all ranks do not make the whole tensor")
    return Cover(tuple(held), tuple(runs), () if runs else tuple(_parts(held)))


def _held(shape: Sequence[int], box: Box, ranks: tuple[int, ...]) -> HeldBox:
    return HeldBox(box, ranks, *span_of(shape, box))


def _sweep(flat: Flat) -> list[HeldRange]:
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
            found.append(HeldRange(first, stop, tuple(sorted(ranks))))
    return found


def _parts(held: Sequence[HeldBox]) -> list[HeldRange]:
    """Return what boxes hold that lie in each other's gaps, such as shards of columns."""
    found: list[tuple[int, int, set[int]]] = []
    for one in sorted(held, key=lambda one: one.first):
        if found and one.first < found[-1][1]:
            first, stop, ranks = found[-1]
            ranks.update(one.ranks)
            found[-1] = first, max(stop, one.stop), ranks
        else:
            found.append((one.first, one.stop, set(one.ranks)))
    return [HeldRange(first, stop, tuple(sorted(ranks))) for first, stop, ranks in found]


# Bytes. Larger, more edges of shards travel; smaller, writes get shorter.
GRAIN = 64 * 1024

Blocks = tuple[int, int]  # from the first on, up to the second
Runs = Collection[tuple[int, int, Sequence[int]]]  # blocks, and ranks


class OwnedBlocks(NamedTuple):
    """Blocks [first, stop) of the file, and the rank that writes them.

    Attributes:
        direct: all of them are in its memory as they are in the file.
    """

    first: int
    stop: int
    owner: int
    direct: bool


def _blocks_in(first: int, stop: int) -> Blocks:
    """Return the whole blocks in bytes [first, stop) of the file."""
    return -(-first // GRAIN), stop // GRAIN


def _divide(blocks: int, whole: Runs, parts: Runs, left: dict[int, int]) -> list[OwnedBlocks]:
    """Return which rank writes what of a file, in its order.

    Args:
        blocks: of the file.
        whole: blocks of which each of some ranks has all, in the order in which they are given
            out; all runs are disjoint, those of `parts` too.
        parts: blocks of which each of several ranks has a part.
        left: how many blocks each writer still gets; updated.
    """
    found: list[OwnedBlocks] = []
    _share(found, whole, left, True)
    taken = sorted([*found, *(OwnedBlocks(first, stop, -1, False) for first, stop, _ in parts)])
    edges = [(first, stop, near) for first, stop, *near in _gaps(blocks, taken)]
    _share(found, edges, left, False)
    _share(found, parts, left, False)
    found.sort()
    found += _rest(_gaps(blocks, found), left)
    found.sort()
    return found


def _share(found: list[OwnedBlocks], runs: Runs, left: dict[int, int], direct: bool) -> None:
    """Give blocks to their ranks, one after the other, as far as their shares go."""
    for first, stop, ranks in runs:
        for rank in ranks:
            count = min(stop - first, left.get(rank, 0))
            if count:
                left[rank] -= count
                found.append(OwnedBlocks(first, first + count, rank, direct))
                first += count
                if first == stop:
                    break


def _gaps(blocks: int, found: Sequence[OwnedBlocks]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the blocks that nobody writes yet, with the owners on both sides; -1: none."""
    at, before = 0, -1
    for first, stop, owner, _ in [*found, OwnedBlocks(blocks, blocks, -1, False)]:
        if at < first:
            yield at, first, before, owner
        at, before = stop, owner


def _rest(gaps: Iterable[tuple[int, int, int, int]], left: dict[int, int]) -> list[OwnedBlocks]:
    """Give the gaps to ranks that have less than their share, in file order."""
    found: list[OwnedBlocks] = []
    writers = iter([rank for rank, count in left.items() if count])
    rank = -1
    for first, stop, *_ in gaps:
        while first < stop:
            if not left.get(rank, 0):
                rank = next(writers)
            count = min(stop - first, left[rank])
            left[rank] -= count
            found.append(OwnedBlocks(first, first + count, rank, False))
            first += count
    return found


_RANK_0 = (0,)


def owned_blocks(
    nbytes: int,
    records: Sequence[tuple[int, int, int, int]],
    writers: Sequence[int],
    specs: Sequence[TensorSpec],
    size: int,
) -> list[OwnedBlocks]:
    """Return which rank writes what, in file order: the same on every rank.

    Args:
        nbytes, records, writers: see `FilePlan`.
        specs: of the sources.
        size: of the group.

    Raises:
        ValueError: nobody holds some of a tensor.
    """
    blocks = -(-nbytes // GRAIN)
    share, more = divmod(blocks, len(writers))
    left = {rank: share + (index < more) for index, rank in enumerate(writers)}
    alone: list[tuple[int, int, tuple[int, ...]]] = []
    several: list[tuple[int, int, tuple[int, ...]]] = []
    parts: list[tuple[int, int, tuple[int, ...]]] = []
    of_rank_0: list[tuple[int, int]] = []  # bytes
    at = 0
    for _, source, offset, length in records:
        of_rank_0.append((at, offset))
        at = offset + length
        if source < 0:
            of_rank_0.append((offset, at))
            continue
        spec = specs[source]
        item = spec.dtype.itemsize
        cover = cover_of(spec.shape, spec.held, size)
        for first, stop, ranks in cover.runs:
            if ranks == _RANK_0:
                of_rank_0.append((offset + first * item, offset + stop * item))
                continue
            begin, end = _blocks_in(offset + first * item, offset + stop * item)
            if begin < end:
                (several if len(ranks) > 1 else alone).append((begin, end, ranks))
        for first, stop, ranks in cover.parts:
            begin, end = _blocks_in(offset + first * item, offset + stop * item)
            if begin < end:
                parts.append((begin, end, ranks))
    of_rank_0.append((at, blocks * GRAIN))
    for begin, end in joined(of_rank_0):  # small ones side by side fill blocks
        first, stop = _blocks_in(begin, end)
        if first < stop:
            alone.append((first, stop, _RANK_0))
    whole = [*sorted(alone), *several]
    return _divide(blocks, whole, parts, left)
