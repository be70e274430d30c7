"""Who reads which part of the file.

The file is cut into aligned blocks. What only one rank needs it reads itself; what several need
is divided among them, so that all of them read about as many bytes. No block is read by two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fastserial.distributed.plan.balance import Workload, assign

__all__ = ["NeedMap", "ReadShare", "block_bytes", "share_out"]

# Bytes of the smallest block: more than the gaps that `loading.planner` reads along, so that
# nobody reads what others own.
_FINEST = 256 * 1024
_MOST_BLOCKS = 32 * 1024
_MOST_GATHERED = 32 * 1024 * 1024  # bytes of all ranks' maps together
_YES = b"\x01"


def block_bytes(file_size: int, ranks: int) -> int:
    """Return the block size for a file: a power of two times the smallest (bytes)."""
    most = max(1024, min(_MOST_BLOCKS, _MOST_GATHERED // ranks))
    block = _FINEST
    while file_size > block * most:
        block *= 2
    return block


class NeedMap:
    """Which blocks of the file a rank needs; one byte for each."""

    def __init__(self, file_size: int, block: int) -> None:
        self.block = block
        self.blocks = bytearray(-(-file_size // block))

    def add(self, first: int, stop: int) -> None:
        """Mark the file's bytes [first, stop)."""
        if first < stop:
            low, high = first // self.block, min(len(self.blocks), -(-stop // self.block))
            self.blocks[low:high] = _YES * (high - low)

    def runs(self) -> list[tuple[int, int]]:
        """Return the marked bytes as runs of blocks; the last may go past the file's end."""
        return [(first * self.block, stop * self.block) for first, stop in _runs(self.blocks)]


class ReadShare(NamedTuple):
    """Bytes [first, stop) of the file: `owner` reads them, all `members` need some of them."""

    first: int
    stop: int
    owner: int
    members: tuple[int, ...]


def share_out(maps: Sequence[bytes | bytearray], block: int) -> list[ReadShare]:
    """Divide what is needed among those who need it.

    Args:
        maps: of each rank.
        block: bytes of a block.

    Returns:
        The shares in file order, the same on every rank; the last may go past the file's end.
    """
    segments = list(_segments(maps))
    items = [Workload((stop - at) * block, members, stop - at) for at, stop, members in segments]
    found: list[ReadShare] = []
    for number, owner, first, stop in assign(items, len(maps), least=block):
        begin, _, members = segments[number]
        found.append(ReadShare((begin + first) * block, (begin + stop) * block, owner, members))
    return found


def _segments(maps: Sequence[bytes | bytearray]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield runs of blocks that the same ranks need: (first, stop, those ranks)."""
    edges: dict[int, list[int]] = {}
    for rank, one in enumerate(maps):
        for first, stop in _runs(one):
            edges.setdefault(first, []).append(rank)
            edges.setdefault(stop, []).append(rank)
    inside: set[int] = set()
    before = 0
    for edge in sorted(edges):
        if inside:
            yield before, edge, tuple(sorted(inside))
        inside.symmetric_difference_update(edges[edge])
        before = edge


def _runs(one: bytes | bytearray) -> Iterator[tuple[int, int]]:
    first = one.find(_YES)
    while first >= 0:
        stop = one.find(b"\0", first)
        stop = stop if stop >= 0 else len(one)
        yield first, stop
        first = one.find(_YES, stop)
