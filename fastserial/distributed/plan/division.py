"""Who writes which blocks of the file: the same amount each, and of that, what it has.

The file is cut at multiples of `GRAIN`, so that no page is written by two ranks. A writer gets the
blocks that it alone holds, up to its share; those that several hold are shared out among them; a
block between two goes to one of its neighbours, what lies in strides to those that hold parts of
it. What is left goes to whoever has not its share yet, in file order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from fastserial.distributed.plan.covers import cover_of
from fastserial.distributed.sharding.pieces import TensorSpec

__all__ = ["GRAIN", "OwnedBlocks", "owned_blocks"]

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
    """Return who writes what of a file, in its order.

    Args:
        blocks: of the file.
        whole: blocks of which each of some ranks has all, in the order in which they are given
            out; all runs are disjoint, those of `parts` too.
        parts: blocks of which each of several ranks has a part.
        left: how many blocks each writer shall have; what it gets is taken off.
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
    """Give the gaps to whoever has not its share, in file order."""
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
            begin, end = _blocks_in(offset + first * item, offset + stop * item)
            if begin < end:
                (several if len(ranks) > 1 else alone).append((begin, end, ranks))
        for first, stop, ranks in cover.parts:
            begin, end = _blocks_in(offset + first * item, offset + stop * item)
            if begin < end:
                parts.append((begin, end, ranks))
    of_rank_0.append((at, blocks * GRAIN))
    whole = [*sorted([*alone, *_joined(of_rank_0)]), *several]
    return _divide(blocks, whole, parts, left)


def _joined(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield the blocks in ranges of bytes that rank 0 has; small ones side by side fill blocks."""
    first = stop = -1
    for begin, end in [*sorted(ranges), (-1, -1)]:
        if begin == stop:
            stop = end
            continue
        blocks = _blocks_in(first, stop)
        if blocks[0] < blocks[1]:
            yield *blocks, _RANK_0
        first, stop = begin, end
