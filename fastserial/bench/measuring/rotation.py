"""Runs rows interleaved, A B C A B C, so that drift of the machine hits all of them alike."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fastserial.bench.measuring.identical import digest
from fastserial.bench.measuring.measure import Sample
from fastserial.bench.measuring.rows import Row
from fastserial.bench.measuring.settle import settle

__all__ = ["Measured", "Plan", "rotate"]

# One stem for all: the archive name, and with it the bytes of a zip, depends on it.
_STEM = "checkpoint"


@dataclass(frozen=True, slots=True)
class Plan:
    """Rounds that count, warm-up rounds before them, and the pause before each run (seconds)."""

    runs: int
    warmups: int = 1
    pause: float = 0.3


@dataclass(slots=True)
class Measured:
    """A row and its sample of each round.

    Attributes:
        identical: whether its files held the right bytes; None if there is nothing to compare.
        equal: whether what was read back equals what was written; None if not read back.
    """

    row: Row
    samples: list[Sample] = field(default_factory=list)
    identical: bool | None = None
    equal: bool | None = None


def rotate(
    rows: Sequence[Row],
    folder: Path,
    plan: Plan,
    on_run: Callable[[str], None] = lambda text: None,
) -> list[Measured]:
    """Run all rows in turn, warm-ups first, and return their samples round by round.

    Each run writes a name that was never used before, or overwrites, as the row says. Bytes and
    contents are compared in the first and in the last round.
    """
    measured = [Measured(row) for row in rows]
    wanted = {row.same_bytes_as for row in rows}
    digests: dict[str, str] = {}
    rounds = plan.warmups + plan.runs
    overwritten = folder / f"{_STEM}.overwritten"
    for turn in range(rounds):
        counts = turn >= plan.warmups
        label = f"round {turn - plan.warmups + 1}/{plan.runs}" if counts else "warm-up"
        for index, one in enumerate(measured):
            row = one.row
            on_run(f"{label}: {row.name}")
            path = overwritten if row.overwrites else folder / f"{_STEM}.{turn}-{index}"
            settle(plan.pause)
            sample = row.run(path)
            if counts:
                one.samples.append(sample)
            if turn == 0 and row.name in wanted:
                digests[row.name] = digest(path)
            if row.same_bytes_as in digests and turn in (0, rounds - 1):
                same = digest(path) == digests[row.same_bytes_as]
                one.identical = same and one.identical is not False
            if row.check is not None and turn in (0, rounds - 1):
                one.equal = row.check(path) and one.equal is not False
            if not row.overwrites:
                _remove(path)
    overwritten.unlink(missing_ok=True)
    return measured


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
