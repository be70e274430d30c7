"""What `fastserial bench onefile` measures, and what comes back; needs neither torch nor more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["GATHER", "OURS", "OneFileBench", "RowResult", "fio_name"]

GATHER = "gather + torch.save"
OURS = "fastserial,"  # begins the names of our rows


@dataclass(frozen=True, slots=True)
class OneFileBench:
    """What to measure.

    Attributes:
        folder: where to write.
        nbytes: size of the whole state, about.
        tensors: how many tensors it has.
        ranks: processes on this machine, each with its shard of every tensor.
        writers: how many of them write; a row for each.
        runs: rounds that count; one warm-up comes before.
        with_fio: compare with fio.
        others: also save by a gather, and by torch.distributed.checkpoint.
        pause: seconds of rest between two saves.
    """

    folder: str
    nbytes: int = 1 << 30
    tensors: int = 300
    ranks: int = 4
    writers: Sequence[int] = (1, 2, 4)
    runs: int = 3
    with_fio: bool = True
    others: bool = True
    pause: float = 0.3


@dataclass(slots=True)
class RowResult:
    """One way to write the file.

    Attributes:
        name: of the row.
        seconds: of each round, of the slowest rank.
        nbytes: of the file.
        extra_bytes: highest peak of extra memory of any rank; None where unknown.
        yardstick: the row of fio with as many writers, or None.
        identical: whether its bytes are those of the gathered save; None if not compared.
        parts: of each round, what each rank tells (`RankReport`).
        problem: why it could not be measured, or None.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    nbytes: int = 0
    extra_bytes: int | None = None
    yardstick: str | None = None
    identical: bool | None = None
    parts: list[list[dict[str, Any]]] = field(default_factory=list)
    problem: str | None = None


def fio_name(jobs: int) -> str:
    """Return the name of fio's row."""
    return f"fio, {jobs} job{'s' * (jobs > 1)}"
