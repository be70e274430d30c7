"""What `fastserial bench dcp` measures, and what comes back; needs neither torch nor more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = [
    "CASES",
    "MIXED",
    "PLANNED",
    "SHARDS",
    "SMALL",
    "STOCK",
    "Balance",
    "DcpBench",
    "DcpResult",
    "DcpRow",
    "fio_name",
]

MIXED, SMALL, SHARDS, PLANNED = CASES = ("mixed", "small", "small-shards", "planning")
STOCK = "DCP"  # as it comes; begins the names of its other rows


@dataclass(frozen=True, slots=True)
class DcpBench:
    """What to measure.

    Attributes:
        folder: where to write.
        cases: of `CASES`.
        nbytes, tensors: size of the mixed state, and how many tensors it has.
        small: how many tensors of 32 bytes the small states have.
        planned: how many tensors the state has of which the planning is looked at.
        ranks: processes on this machine; each count by itself.
        runs: rounds that count; one warm-up comes before.
        with_fio: compare with fio.
        pause: seconds of rest between two rows, when no page is dirty; 0: nothing is waited for.
    """

    folder: str
    cases: Sequence[str] = CASES
    nbytes: int = 1 << 30
    tensors: int = 300
    small: int = 3000
    planned: int = 4000
    ranks: Sequence[int] = (1, 2, 4)
    runs: int = 3
    with_fio: bool = True
    pause: float = 0.3


@dataclass(slots=True)
class DcpRow:
    """One way to save and load a state, on so many ranks.

    Times are of each round, in seconds, of the slowest rank.

    Attributes:
        plans: of each save, until the first byte could be written; empty for fio.
        nbytes: of the folder.
        save_extra, load_extra: highest peak of memory of a rank beyond what it held before; None
            where unknown.
        equal: whether what was loaded is what was saved; None if not compared.
        problem: why it could not be measured, or None.
    """

    name: str
    case: str
    ranks: int
    saves: list[float] = field(default_factory=list)
    plans: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    nbytes: int = 0
    save_extra: int | None = None
    load_extra: int | None = None
    equal: bool | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Balance:
    """Bytes that each rank writes of a state that all of them have."""

    shape: str
    stock: Sequence[int]
    ours: Sequence[int]


@dataclass(frozen=True, slots=True)
class DcpResult:
    """All that was found."""

    rows: Sequence[DcpRow]
    balance: Sequence[Balance]

    @property
    def right(self) -> bool:
        """Whether all that was loaded is what was saved."""
        return all(row.equal is not False for row in self.rows)


def fio_name(jobs: int) -> str:
    """Return the name of fio's row."""
    return f"fio, {jobs} job{'s' * (jobs > 1)}"
