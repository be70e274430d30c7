"""Which rank writes which blocks of the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fastserial.distributed.plan.covers import cover_of
from fastserial.distributed.plan.division import GRAIN, Owned, blocks_in, divide
from fastserial.distributed.sharding.pieces import TensorSpec

__all__ = ["owned_blocks"]

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
