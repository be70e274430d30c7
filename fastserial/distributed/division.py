"""Who writes which blocks of the file: the same amount each, and of that, what it has.

The file is cut at multiples of `GRAIN`, so that no page is written by two ranks. A writer gets the
blocks that it alone holds, up to its share; then those that several hold are shared out among
them; then those of which several hold parts. What is left goes to a neighbour that has not its
share yet, else to whoever has not, in file order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

__all__ = ["GRAIN", "Owned", "Runs", "blocks_in", "divide"]

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
    for runs, direct in ((several, True), (parts, False)):
        for first, stop, ranks in runs:
            for rank in ranks:
                count = min(stop - first, left.get(rank, 0))
                if count:
                    left[rank] -= count
                    found.append(Owned(first, first + count, rank, direct))
                    first += count
                    if first == stop:
                        break
    found.sort()
    found += _rest(list(_gaps(ranges, found)), left)
    found.sort()
    return found


def _gaps(ranges: Sequence[Blocks], found: Sequence[Owned]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the blocks of the ranges that nobody writes yet, with the owners on both sides."""
    index, before = 0, -1
    for begin, end in ranges:
        at = begin
        while index < len(found) and found[index].first < end:
            first, stop, owner, _ = found[index]
            if at < first:
                yield at, first, before, owner
            at, before = stop, owner
            index += 1
        if at < end:
            yield at, end, before, found[index].owner if index < len(found) else -1


def _rest(gaps: Sequence[tuple[int, int, int, int]], left: dict[int, int]) -> Iterator[Owned]:
    """Give the gaps to their neighbours, then to anyone, as far as their shares go."""
    more: list[Blocks] = []
    for first, stop, *neighbours in gaps:
        for rank in neighbours:
            count = min(stop - first, left.get(rank, 0))
            if count:
                left[rank] -= count
                yield Owned(first, first + count, rank, False)
                first += count
        if first < stop:
            more.append((first, stop))
    writers = iter([rank for rank, count in left.items() if count])
    rank = -1
    for first, stop in more:
        while first < stop:
            if not left.get(rank, 0):
                rank = next(writers)
            count = min(stop - first, left[rank])
            left[rank] -= count
            yield Owned(first, first + count, rank, False)
            first += count
