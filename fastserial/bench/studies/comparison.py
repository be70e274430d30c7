"""Rows on one state dict beside fio, measured in turn: what three of the benchmarks do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.machine import Place
from fastserial.bench.measuring.measure import Sample
from fastserial.bench.measuring.pages import reserved_huge_bytes
from fastserial.bench.measuring.rotation import Plan, rotate
from fastserial.bench.measuring.rows import Row
from fastserial.bench.measuring.settle import settle
from fastserial.bench.measuring.summary import Line, summarize
from fastserial.bench.subjects import fio
from fastserial.bench.subjects.payload import check_memory
from fastserial.config import current

__all__ = ["FIO", "Comparison", "compare"]

FIO = "fio"
_SWITCHED_OFF = {FIO: "switched off (--no-fio)"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was measured, where, and with what options of fastserial.

    Attributes:
        data: description of what was saved.
        runs: rounds that count.
        missing: rows that are not there, and why: with the command that installs them.
        fio_small_pages: fio's buffers were on ordinary pages.
    """

    data: str
    runs: int
    place: Place
    lines: tuple[Line, ...]
    missing: dict[str, str]
    fio_small_pages: bool

    @property
    def right(self) -> bool:
        """Whether nothing wrong was found in anything that was written."""
        return all(line.right for line in self.lines)


def compare(
    make_rows: Callable[[bool], list[Row]],
    data: str,
    nbytes: int,
    folder: Path,
    plan: Plan,
    *,
    with_fio: bool = True,
    missing: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Measure rows in turn, fio's best variants among them.

    Args:
        make_rows: returns the rows; its argument: also some on ordinary pages.
        data: description of what is saved.
        nbytes: how large it is, about; fio writes as much.
        folder: a scratch folder.
        missing: other rows that are not there, and why.
        say: receives a text for each step.

    Raises:
        WriteError: a save failed.
    """

    def once(variant: fio.FioVariant) -> Sample:
        say(f"looking for fio's best: {variant}")
        path = folder / "fio"
        settle(plan.pause)
        try:
            return fio.run_fio(variant, path, nbytes)
        finally:
            path.unlink(missing_ok=True)

    yardsticks, beside, absent = _variants(once, nbytes) if with_fio else ([], [], _SWITCHED_OFF)
    small_pages = any(not variant.huge for variant in yardsticks)
    fio_rows = [fio.fio_row(variant, nbytes) for variant in [*yardsticks, *beside]]
    measured = rotate([*fio_rows, *make_rows(small_pages)], folder, plan, say)
    return Comparison(
        data,
        plan.runs,
        Place.of(folder.parent, current()),
        tuple(summarize(measured, [str(variant) for variant in yardsticks])),
        {**absent, **(missing or {})},
        small_pages,
    )


def _variants(
    try_one: Callable[[fio.FioVariant], Sample], nbytes: int
) -> tuple[list[fio.FioVariant], list[fio.FioVariant], dict[str, str]]:
    """Return fio's best variants, the faster of them with fresh data, and what is missing, why."""
    if not fio.installed():
        return [], [], {FIO: "not installed: apt-get install fio"}
    try:
        best = fio.best_variants(try_one, reserved_huge_bytes() >= fio.HUGE_BYTES)
    except BenchError as error:
        return [], [], {FIO: str(error)}
    variants = [fio.fresh_variant(variant) for variant in best]
    try:
        check_memory(nbytes, "save less")
        return best, [max(variants, key=lambda variant: try_one(variant).bandwidth)], {}
    except BenchError as error:
        return best, [], {f"{FIO}, fresh data": str(error)}
