"""Who writes which bytes of the file: the same amount each, and of that, what it has.

The file is cut at multiples of `GRAIN`, so that no page is written by two ranks. A rank gets the
runs that it alone holds, up to its share; then those that several hold are shared out among them;
what is left, the edges between shards and what lies in strides, goes to whoever has not its share
yet, in file order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

__all__ = ["GRAIN", "FileRun", "Owned", "divide"]

# Bytes. Larger, more edges of shards travel; smaller, writes get shorter.
GRAIN = 64 * 1024


class FileRun(NamedTuple):
    """Bytes [first, stop) of the file, which some ranks have in this order in their memory."""

    first: int
    stop: int
    ranks: tuple[int, ...]


class Owned(NamedTuple):
    """Bytes [first, stop) of the file, and the rank that writes them."""

    first: int
    stop: int
    owner: int


def divide(nbytes: int, runs: Iterable[FileRun], writers: Sequence[int]) -> list[Owned]:
    """Return who writes what: all of the file, in its order.

    Args:
        nbytes: size of the file.
        runs: disjoint.
        writers: ranks that write, each a share equal to one block.
    """
    blocks = -(-nbytes // GRAIN)
    share, more = divmod(blocks, len(writers))
    left = {rank: share + (index < more) for index, rank in enumerate(writers)}
    found: list[Owned] = []
    several: list[FileRun] = []
    for run in runs:
        first, stop = -(-run.first // GRAIN), run.stop // GRAIN
        if first >= stop:
            continue
        if len(run.ranks) > 1:
            several.append(FileRun(first, stop, run.ranks))
        else:
            _take(found, left, first, stop, run.ranks)
    for first, stop, ranks in several:
        _take(found, left, first, stop, ranks)
    found.sort()
    rest, at = [], 0
    for owned in [*found, Owned(blocks, blocks, 0)]:
        if at < owned.first:
            rest.append((at, owned.first))
        at = owned.stop
    for first, stop in rest:
        _take(found, left, first, stop, writers)
    found.sort()
    return _joined(found, nbytes)


def _take(
    found: list[Owned], left: dict[int, int], first: int, stop: int, ranks: Sequence[int]
) -> None:
    """Give blocks [first, stop) to the ranks, one after the other, as far as their shares go."""
    for rank in ranks:
        count = min(stop - first, left.get(rank, 0))
        if count:
            left[rank] -= count
            found.append(Owned(first, first + count, rank))
            first += count
        if first == stop:
            return


def _joined(found: list[Owned], nbytes: int) -> list[Owned]:
    """Return the ranges in bytes, what lies side by side in one."""
    joined: list[Owned] = []
    for first, stop, owner in found:
        begin, end = first * GRAIN, min(stop * GRAIN, nbytes)
        if joined and joined[-1].owner == owner and joined[-1].stop == begin:
            joined[-1] = Owned(joined[-1].first, end, owner)
        else:
            joined.append(Owned(begin, end, owner))
    return joined
