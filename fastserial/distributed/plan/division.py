"""Who writes which blocks of the file: the same amount each, and of that, what it has.

The file is cut at multiples of `GRAIN`, so that no page is written by two ranks. A writer gets the
blocks that it alone holds, up to its share; those that several hold are shared out among them; a
block between two goes to one of its neighbours, what lies in strides to those that hold parts of
it. What is left goes to whoever has not its share yet, in file order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fastserial.distributed.plan.covers import cover_of
from fastserial.distributed.sharding.pieces import TensorSpec

__all__ = ["GRAIN", "Owned", "Runs", "blocks_in", "divide", "owned_blocks"]

# Bytes. Larger, more edges of shards travel; smaller, writes get shorter.
GRAIN = 64 * 1024

Blocks = tuple[int, int]  # from the first on, up to the second
Runs = Iterable[tuple[int, int, tuple[int, ...]]]  # blocks, and ranks


class Owned(NamedTuple):
    """Blocks [first, stop) of the file, and the rank that writes them.

    Attributes:
        direct: all of them are in its memory as they are in the file.
    """

    first: int
    stop: int
    owner: int
    direct: bool


def blocks_in(first: int, stop: int) -> Blocks:
    """Return the whole blocks in bytes [first, stop) of the file."""
    return -(-first // GRAIN), stop // GRAIN


def divide(
    ranges: Sequence[Blocks],
    alone: Runs,
    several: Runs,
    parts: Runs,
    left: dict[int, int],
) -> list[Owned]:
    """Return who writes what of some ranges, in file order.

    Args:
        ranges: what is divided: disjoint, in file order.
        alone: blocks that one rank has; within the ranges, as the next two; all disjoint.
        several: blocks that each of several ranks has.
        parts: blocks of which each of several ranks has a part.
        left: how many blocks each writer shall have; what it gets is taken off.
    """
    found: list[Owned] = []
    for first, stop, ranks in alone:
        rank = ranks[0]
        count = left.get(rank, 0)
        if count:
            if first + count < stop:
                stop = first + count
            left[rank] = count - stop + first
            found.append(Owned(first, stop, rank, True))
    _share(found, several, left, True)
    parts = list(parts)
    taken = sorted([*found, *(Owned(first, stop, -1, False) for first, stop, _ in parts)])
    for first, stop, before, behind in list(_gaps(ranges, taken)):
        count = left.get(before, 0)
        if stop - first <= count:  # most gaps are one block
            left[before] = count - stop + first
            found.append(Owned(first, stop, before, False))
        else:
            _share(found, [(first, stop, (before, behind))], left, False)
    _share(found, parts, left, False)
    found.sort()
    found += _rest(_gaps(ranges, found), left)
    found.sort()
    return found


def _share(found: list[Owned], runs: Runs, left: dict[int, int], direct: bool) -> None:
    """Give blocks to their ranks, one after the other, as far as their shares go."""
    for first, stop, ranks in runs:
        for rank in ranks:
            count = min(stop - first, left.get(rank, 0))
            if count:
                left[rank] -= count
                found.append(Owned(first, first + count, rank, direct))
                first += count
                if first == stop:
                    break


def _gaps(ranges: Sequence[Blocks], found: Sequence[Owned]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the blocks of the ranges that nobody writes yet, with the owners on both sides."""
    rest = iter(found)
    end = (1 << 62, 1 << 62, -1, False)
    first, stop, owner, _ = next(rest, end)
    before = -1
    for begin, finish in ranges:
        at = begin
        while first < finish:
            if at < first:
                yield at, first, before, owner
            at, before = stop, owner
            first, stop, owner, _ = next(rest, end)
        if at < finish:
            yield at, finish, before, owner


def _rest(gaps: Iterable[tuple[int, int, int, int]], left: dict[int, int]) -> list[Owned]:
    """Give the gaps to whoever has not its share, in file order."""
    found: list[Owned] = []
    writers = iter([rank for rank, count in left.items() if count])
    rank = -1
    for first, stop, *_ in gaps:
        while first < stop:
            if not left.get(rank, 0):
                rank = next(writers)
            count = min(stop - first, left[rank])
            left[rank] -= count
            found.append(Owned(first, first + count, rank, False))
            first += count
    return found


_RANK_0 = (0,)


def owned_blocks(
    nbytes: int,
    records: Sequence[tuple[int, int, int, int]],
    writers: Sequence[int],
    specs: Sequence[TensorSpec],
    size: int,
) -> list[Owned]:
    """Return who writes what, in file order: the same on every rank.

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
            begin, end = blocks_in(offset + first * item, offset + stop * item)
            if begin < end:
                (several if len(ranks) > 1 else alone).append((begin, end, ranks))
        for first, stop, ranks in cover.parts:
            begin, end = blocks_in(offset + first * item, offset + stop * item)
            if begin < end:
                parts.append((begin, end, ranks))
    of_rank_0.append((at, blocks * GRAIN))
    alone = sorted([*alone, *_joined(of_rank_0)])
    return divide([(0, blocks)] if blocks else [], alone, several, parts, left)


def _joined(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield the blocks in ranges of bytes that rank 0 has; small ones side by side fill blocks."""
    first = stop = -1
    for begin, end in [*sorted(ranges), (-1, -1)]:
        if begin == stop:
            stop = end
            continue
        blocks = blocks_in(first, stop)
        if blocks[0] < blocks[1]:
            yield *blocks, _RANK_0
        first, stop = begin, end
