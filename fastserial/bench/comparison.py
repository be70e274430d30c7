"""Rows on one state dict beside fio, measured in turn: what three of the benchmarks do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastserial import config, tuned
from fastserial.bench import fio
from fastserial.bench.errors import BenchError
from fastserial.bench.machine import Machine, this_machine
from fastserial.bench.measure import Sample
from fastserial.bench.pages import reserved_huge_bytes
from fastserial.bench.payload import check_memory
from fastserial.bench.rotation import Plan, rotate
from fastserial.bench.rows import Row
from fastserial.bench.settle import settle
from fastserial.bench.summary import Line, summarize
from fastserial.probes import Folder, probe_folder

__all__ = ["FIO", "Comparison", "compare"]

FIO = "fio"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was measured, where, and with what options of fastserial.

    Attributes:
        data: what was saved, in words.
        runs: rounds that count.
        missing: rows that are not there, and why: with the command that installs them.
        fio_small_pages: fio's buffers were on ordinary pages.
    """

    data: str
    runs: int
    machine: Machine
    folder: Folder
    options: dict[str, Any]
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
        make_rows: returns the rows; told whether some on ordinary pages are wanted, too.
        data: what is saved, in words.
        nbytes: how large it is, about; fio writes as much.
        folder: a scratch folder.
        missing: other rows that are not there, and why.
        say: is told what is being done.

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

    yardsticks, problem = _yardsticks(once, with_fio)
    fresh, fresh_problem = _fresh(once, yardsticks, nbytes)
    small_pages = any(not variant.huge for variant in yardsticks)
    fio_rows = [fio.fio_row(variant, nbytes) for variant in yardsticks]
    beside = [fio.fio_row(variant, nbytes) for variant in fresh]
    measured = rotate([*fio_rows, *beside, *make_rows(small_pages)], folder, plan, say)
    absent = {FIO: problem, f"{FIO}, fresh data": fresh_problem}
    return Comparison(
        data,
        plan.runs,
        this_machine(),
        probe_folder(folder.parent),
        _plain(tuned.config_for(folder.parent)),
        tuple(summarize(measured, [row.name for row in fio_rows])),
        {**{name: why for name, why in absent.items() if why}, **(missing or {})},
        small_pages,
    )


def _yardsticks(
    try_one: Callable[[fio.FioVariant], Sample], wanted: bool
) -> tuple[list[fio.FioVariant], str | None]:
    """Return fio's best variants, or why there are none."""
    if not wanted:
        return [], "switched off (--no-fio)"
    if not fio.installed():
        return [], "not installed: apt-get install fio"
    try:
        return fio.best_variants(try_one, reserved_huge_bytes() >= fio.HUGE_BYTES), None
    except BenchError as error:
        return [], str(error)


def _fresh(
    try_one: Callable[[fio.FioVariant], Sample], yardsticks: list[fio.FioVariant], nbytes: int
) -> tuple[list[fio.FioVariant], str | None]:
    """Return the fastest of fio's best variants with fresh data, or why there is none."""
    if not yardsticks:
        return [], None
    variants = [fio.fresh_variant(variant) for variant in yardsticks]
    try:
        check_memory(nbytes, "save less")
        return [max(variants, key=lambda variant: try_one(variant).bandwidth)], None
    except BenchError as error:
        return [], str(error)


def _plain(options: config.Config) -> dict[str, Any]:
    values = dataclasses.asdict(options)
    # the rest are functions that are called with reports
    return {name: value for name, value in values.items() if isinstance(value, str | int | float)}
