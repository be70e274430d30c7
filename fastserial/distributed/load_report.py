"""What a collective load did, with a line for each rank."""

from __future__ import annotations

from dataclasses import dataclass

from fastserial.reports import LoadReport, format_bytes

__all__ = ["DistributedLoadReport", "RankLoad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """What one rank did. Sizes are bytes, times seconds.

    Attributes:
        rank: in the group.
        read, sent, received: bytes from the file, to other ranks and from them.
        plan: until the first byte was read.
        own: reading what this rank alone wanted.
        share: reading, sending and receiving what several wanted.
    """

    rank: int
    read: int
    sent: int
    received: int
    plan: float
    own: float
    share: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank}: read={format_bytes(self.read)}, sent={format_bytes(self.sent)}, "
            f"received={format_bytes(self.received)}, plan={self.plan * 1000:.0f}msec, "
            f"own={self.own * 1000:.0f}msec, share={self.share * 1000:.0f}msec"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedLoadReport(LoadReport):
    """One finished collective load, the same on every rank.

    Attributes:
        bytes: what all ranks together read of the file, without its index.
        ranks: a line for each rank.
        missing_keys: with `strict=False`, what this rank wanted and the file lacks; unchanged.
        unexpected_keys: with `strict=False`, what the file holds and no rank wanted.
    """

    ranks: tuple[RankLoad, ...] = ()
    missing_keys: tuple[str, ...] = ()
    unexpected_keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        first = LoadReport.__str__(self)
        return "\n".join((first, *map(str, self.ranks)))
