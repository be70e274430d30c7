"""`fastserial bench save`: one checkpoint, stock torch, fastserial and its engines, and fio.

Timed is the whole call, in the durable rows with the fsync of file and directory: fastserial's own,
or one added to the others. fio writes a new file of the same size, its final fsync included.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastserial.bench import fio
from fastserial.bench.compare import tensors_of, unshared
from fastserial.bench.measure import BenchError, Sample
from fastserial.bench.payload import mixed_state, model_state
from fastserial.bench.rotation import DURABLE, Plan, Row, rotate, summarize
from fastserial.bench.state import check_memory, reserved_huge_bytes, scratch, settle
from fastserial.bench.table import CHECKED, MEASURED, Result, Table
from fastserial.bench.torch_rows import Format, engine_rows, fast, torch_rows
from fastserial.reports import format_bytes

__all__ = ["SaveBench", "compare", "run_save"]

_HEADROOM = 256 << 20
_STEADY = 2.0  # slowest run over the fastest
_PAGES = (
    "fio ran on ordinary pages, fastserial on huge ones: only the rows “small pages” compare like "
    "with like, and a ratio above 1 does not mean faster than the device. For fio on huge pages: "
    "sysctl vm.nr_hugepages=64, and back to what it was afterwards."
)
Others = Callable[[object, Sequence[Format]], tuple[list[Row], dict[str, str]]]


@dataclass(frozen=True, slots=True)
class SaveBench:
    """What to save, and how to measure.

    Attributes:
        folder: where to write; its disk is what is measured.
        nbytes, tensors: of a state dict in mixed sizes, if there is no model.
        model: a name of `payload.MODELS`, or a folder with a transformers config; None: no model.
        optimizer, half: with Adam's states; weights in float16.
        gpu: tensors on the CUDA device.
        formats: torch's containers to save.
        runs: rounds that count; one warm-up comes before.
        overwriting, loose: also over an existing file; also without waiting for the disk.
        with_engines: also the engines that are not in use.
        with_fio: compare with fio.
        pause: seconds of rest between two runs.
    """

    folder: Path
    nbytes: int = 3 << 30
    tensors: int = 300
    model: str | None = None
    optimizer: bool = False
    half: bool = False
    gpu: bool = False
    formats: tuple[Format, ...] = ("zip", "legacy")
    runs: int = 5
    overwriting: bool = True
    loose: bool = True
    with_engines: bool = True
    with_fio: bool = True
    pause: float = 0.3

    def state(self) -> dict[str, Any]:
        """Return what is saved.

        Raises:
            BenchError: memory is short, or the model or a GPU is missing.
        """
        device = "cuda" if self.gpu else "cpu"
        if self.model is None:
            return mixed_state(self.nbytes, self.tensors, device)
        return model_state(self.model, optimizer=self.optimizer, half=self.half, device=device)


def run_save(
    bench: SaveBench,
    say: Callable[[str], None] = lambda text: None,
    others: Others | None = None,
    benchmark: str = "save",
) -> Result:
    """Run the benchmark.

    Args:
        bench: what to save, and how to measure.
        say: receives a text for each step.
        others: makes more rows of the state and the containers, and says why some are not there.
        benchmark: its name.

    Raises:
        BenchError: too little memory or disk, or the folder cannot be used.
        PatchError: the installed torch cannot be patched.
        WriteError: a save failed.
    """
    with fast():  # before minutes are spent on other rows
        pass
    with scratch(bench.folder, 0):  # likewise
        pass
    say("making the data")
    state = bench.state()
    nbytes = sum(tensor.nbytes for tensor in unshared(state).values())
    rows, missing = engine_rows(state, bench.formats) if bench.with_engines else ([], {})
    if others is not None:
        more, absent = others(state, bench.formats)
        rows, missing = [*rows, *more], {**missing, **absent}
    with scratch(bench.folder, 2 * nbytes + _HEADROOM) as folder:
        table, notes = compare(
            lambda small_pages: [
                *torch_rows(
                    state,
                    bench.formats,
                    overwriting=bench.overwriting,
                    loose=bench.loose,
                    small_pages=small_pages,
                ),
                *rows,
            ],
            nbytes,
            folder,
            Plan(bench.runs, pause=bench.pause),
            missing,
            with_fio=bench.with_fio,
            say=say,
        )
    words = [bench.model or "mixed sizes", "float16 weights" * bench.half]
    words += ["Adam's states in float32" * bench.optimizer, "on the GPU" * bench.gpu]
    caption = (
        f"{', '.join(filter(None, words))}: {len(tensors_of(state)):,} tensors, "
        f"{format_bytes(nbytes)}; medians of {bench.runs} interleaved runs (least–greatest); "
        "ratios are of runs of the same round"
    )
    settings = {**asdict(bench), "folder": str(bench.folder)}
    return Result(benchmark, bench.folder, caption, settings, [table], missing, notes)


def compare(
    make_rows: Callable[[bool], list[Row]],
    nbytes: int,
    folder: Path,
    plan: Plan,
    missing: dict[str, str],
    *,
    with_fio: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[Table, list[str]]:
    """Measure rows in turn, fio's best variants among them; return them, and what to know of them.

    Args:
        make_rows: returns the rows; its argument: also some on ordinary pages.
        nbytes: of what they save, about; fio writes as much.
        folder: a scratch folder.
        plan: how often.
        missing: gets why fio is not there.
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

    yardsticks: list[fio.FioVariant] = []
    beside: list[fio.FioVariant] = []
    if not with_fio:
        missing["fio"] = "switched off (--no-fio)"
    elif not fio.installed():
        missing["fio"] = "not installed: apt-get install fio"
    else:
        try:
            yardsticks = fio.best_variants(once, reserved_huge_bytes() >= fio.HUGE_BYTES)
        except BenchError as error:
            missing["fio"] = str(error)
    if yardsticks:
        try:
            check_memory(nbytes, "save less")
            fresh = [fio.fresh_variant(variant) for variant in yardsticks]
            beside = [max(fresh, key=lambda variant: once(variant).bandwidth)]
        except BenchError as error:
            missing["fio, fresh data"] = str(error)
    small_pages = any(not variant.huge for variant in yardsticks)
    rows = [fio.fio_row(variant, nbytes) for variant in [*yardsticks, *beside]]
    measured = rotate([*rows, *make_rows(small_pages)], folder, plan, say)
    found = summarize(measured, [str(variant) for variant in yardsticks])
    notes = [_PAGES] * small_pages + _unsteady(found)
    return Table(found, [*MEASURED, *CHECKED]), notes


def _unsteady(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say so if the durable rows varied much from run to run: the median of the rows."""
    spreads = [row["seconds"] for row in rows if row["group"] == DURABLE]
    factor = statistics.median([spread.high / spread.low for spread in spreads] or [1.0])
    if factor <= _STEADY:
        return []
    note = f"Do not quote this run: the durable rows varied {factor:.1f}-fold (median), so the "
    return [f"{note}disk or the machine was busy with other things."]
