"""`fastserial bench save`: one checkpoint, stock torch, fastserial and fio in the same run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastserial import config, tuned
from fastserial.bench import fio
from fastserial.bench.errors import BenchError
from fastserial.bench.machine import Machine, this_machine
from fastserial.bench.measure import Sample
from fastserial.bench.pages import reserved_huge_bytes
from fastserial.bench.payload import check_memory, mixed_state
from fastserial.bench.rotation import Plan, rotate
from fastserial.bench.rows import Row, fast_row, stock_row
from fastserial.bench.saving import Format, check_torch
from fastserial.bench.scratch import scratch
from fastserial.bench.settle import settle
from fastserial.bench.small import SmallCase, small_cases
from fastserial.bench.startup import Startup, measure_startup
from fastserial.bench.summary import Line, summarize
from fastserial.probes import Folder, probe_folder

__all__ = ["SaveBench", "SaveResult", "run_save"]

_HEADROOM = 256 << 20


@dataclass(frozen=True, slots=True)
class SaveBench:
    """What to measure.

    Attributes:
        folder: where to write.
        nbytes: size of the state dict, about.
        tensors: how many tensors it has.
        runs: rounds that count; one warm-up comes before.
        formats: containers to save.
        overwriting: also measure saves over an existing file.
        small: also measure many small tensors, one tiny object, and the time to start.
        with_fio: compare with fio.
        pause: seconds of rest between two runs.
    """

    folder: Path
    nbytes: int
    tensors: int = 300
    runs: int = 5
    formats: tuple[Format, ...] = ("zip", "legacy")
    overwriting: bool = True
    small: bool = True
    with_fio: bool = True
    pause: float = 0.3


@dataclass(frozen=True, slots=True)
class SaveResult:
    """What was measured, where, and with what options of fastserial."""

    bench: SaveBench
    machine: Machine
    folder: Folder
    options: dict[str, Any]
    lines: tuple[Line, ...]
    fio_missing: str | None
    fio_small_pages: bool
    small: tuple[SmallCase, ...]
    startup: Startup | None

    @property
    def identical(self) -> bool:
        """Whether every file that was compared equals stock torch's."""
        lines = [*self.lines, *(line for case in self.small for line in case.lines)]
        return all(line.identical is not False for line in lines)


def run_save(bench: SaveBench, say: Callable[[str], None] = lambda text: None) -> SaveResult:
    """Run the benchmark; `say` is told what is being done.

    Raises:
        BenchError: too little memory or disk, or the folder cannot be used.
        PatchError: the installed torch cannot be patched.
        WriteError: a save failed.
    """
    check_torch()
    check_memory(bench.nbytes)
    copies = 2 if bench.overwriting else 1
    with scratch(bench.folder, copies * bench.nbytes + _HEADROOM) as folder:
        say("making the data")
        state = mixed_state(bench.nbytes, bench.tensors)
        yardsticks, missing = _yardsticks(bench, folder, say)
        small_pages = any(not variant.huge for variant in yardsticks)
        fio_rows = [fio.fio_row(variant, bench.nbytes) for variant in yardsticks]
        rows = [*fio_rows, *save_rows(state, bench, small_pages)]
        measured = rotate(rows, folder, Plan(bench.runs, pause=bench.pause), say)
        lines = summarize(measured, [row.name for row in fio_rows])
        # closures over the state: its memory is free for what follows
        del state, rows, measured
        small = small_cases(folder, bench.formats, bench.runs, say) if bench.small else []
        startup = measure_startup(max(3, bench.runs), say) if bench.small else None
    return SaveResult(
        bench,
        this_machine(),
        probe_folder(bench.folder),
        _plain(tuned.config_for(bench.folder)),
        tuple(lines),
        missing,
        small_pages,
        tuple(small),
        startup,
    )


def save_rows(
    state: dict[str, torch.Tensor], bench: SaveBench, small_pages: bool = False
) -> list[Row]:
    """Return the rows of torch, stock ones first: what others must equal comes first.

    Args:
        small_pages: add rows on ordinary pages, to compare with fio on ordinary pages.
    """
    rows: list[Row] = [stock_row(state, container) for container in bench.formats]
    if "zip" in bench.formats:
        rows.append(stock_row(state, "zip", crc=False))
    rows += [fast_row(state, container) for container in bench.formats]
    for container in bench.formats if small_pages else ():
        rows.append(fast_row(state, container, huge_pages=False))
    for container in bench.formats if bench.overwriting else ():
        rows.append(stock_row(state, container, overwrites=True))
        rows.append(fast_row(state, container, overwrites=True))
    for container in bench.formats:
        rows.append(stock_row(state, container, durable=False))
        rows.append(fast_row(state, container, durable=False))
        rows.append(fast_row(state, container, durable=False, engine="null"))
    return rows


def _yardsticks(
    bench: SaveBench, folder: Path, say: Callable[[str], None]
) -> tuple[list[fio.FioVariant], str | None]:
    """Return fio's best variants, or why there are none."""
    if not bench.with_fio:
        return [], "fio was switched off (--no-fio)"
    if not fio.installed():
        return [], "fio is not installed: apt-get install fio"

    def once(variant: fio.FioVariant) -> Sample:
        say(f"looking for fio's best: {variant}")
        path = folder / "fio"
        settle(bench.pause)
        try:
            return fio.run_fio(variant, path, bench.nbytes)
        finally:
            path.unlink(missing_ok=True)

    try:
        return fio.best_variants(once, reserved_huge_bytes() >= fio.HUGE_BYTES), None
    except BenchError as error:
        return [], str(error)


def _plain(options: config.Config) -> dict[str, Any]:
    values = dataclasses.asdict(options)
    # the rest are functions that are called with reports
    return {name: value for name, value in values.items() if isinstance(value, str | int | float)}
