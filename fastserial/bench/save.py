"""`fastserial bench save`: one checkpoint, stock torch, fastserial and its engines, and fio.

Timed is the whole call, in the durable rows with the fsync of file and directory: fastserial's own,
or one added to the others. fio writes a new file of the same size, its final fsync included.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastserial.bench import fio
from fastserial.bench.compare import tensors_of, unshared
from fastserial.bench.measure import BenchError, Sample
from fastserial.bench.payload import mixed_state
from fastserial.bench.rotation import DURABLE, Plan, Row, rotate, summarize
from fastserial.bench.state import scratch, settle
from fastserial.bench.table import CHECKED, MEASURED, Result, Table
from fastserial.bench.torch_rows import Format, engine_rows, fast, torch_rows
from fastserial.reports import format_bytes

__all__ = ["SaveBench", "run_save"]

_HEADROOM = 256 << 20
_STEADY = 2.0  # slowest run over the fastest
Others = Callable[[object, Sequence[Format]], tuple[list[Row], dict[str, str]]]


@dataclass(frozen=True, slots=True)
class SaveBench:
    """What to save, and how to measure.

    Attributes:
        folder: where to write; its disk is what is measured.
        nbytes, tensors: of a state dict of mixed sizes.
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
    gpu: bool = False
    formats: tuple[Format, ...] = ("zip", "legacy")
    runs: int = 5
    overwriting: bool = True
    loose: bool = True
    with_engines: bool = True
    with_fio: bool = True
    pause: float = 0.3


def run_save(
    bench: SaveBench,
    say: Callable[[str], None] = lambda text: None,
    others: Others | None = None,
    benchmark: str = "save",
    subject: tuple[str, Callable[[], dict[str, Any]]] | None = None,
) -> Result:
    """Run the benchmark.

    Args:
        bench: what to save, and how to measure.
        say: receives a text for each step.
        others: makes more rows of the state and the containers, and says why some are not there.
        benchmark: its name.
        subject: what is saved instead of mixed sizes: its name, and what makes it.

    Raises:
        BenchError: too little memory or disk, or the folder cannot be used.
        PatchError: the installed torch cannot be patched.
        WriteError: a save failed.
    """
    with fast(), scratch(bench.folder, 0):  # before minutes are spent on other rows
        pass
    say("making the data")
    device = "cuda" if bench.gpu else "cpu"
    what, make_state = subject or (
        "mixed sizes",
        partial(mixed_state, bench.nbytes, bench.tensors, device),
    )
    state = make_state()
    nbytes = sum(tensor.nbytes for tensor in unshared(state).values())
    rows = torch_rows(state, bench.formats, overwriting=bench.overwriting, loose=bench.loose)
    missing: dict[str, str] = {}
    for make in ([engine_rows] if bench.with_engines else []) + ([others] if others else []):
        more, absent = make(state, bench.formats)
        rows += more
        missing |= absent
    with scratch(bench.folder, 2 * nbytes + _HEADROOM) as folder:
        best = _best_of_fio(bench, folder / "fio", nbytes, missing, say)
        if best is not None:
            rows = [fio.fio_row(best, nbytes), *rows]
        found = summarize(rotate(rows, folder, Plan(bench.runs, pause=bench.pause), say), str(best))
    caption = (
        f"{what}{', on the GPU' * bench.gpu}: {len(tensors_of(state)):,} tensors, "
        f"{format_bytes(nbytes)}; medians of {bench.runs} interleaved runs (least–greatest); "
        "ratios are of runs of the same round"
    )
    settings = {**asdict(bench), "folder": str(bench.folder), "subject": what}
    table = Table(found, [*MEASURED, *CHECKED])
    return Result(benchmark, bench.folder, caption, settings, [table], missing, _unsteady(found))


def _best_of_fio(
    bench: SaveBench,
    path: Path,
    nbytes: int,
    missing: dict[str, str],
    say: Callable[[str], None],
) -> fio.FioSettings | None:
    """Return the settings with which fio is fastest; None, and why in `missing`, without fio."""

    def once(settings: fio.FioSettings) -> Sample:
        say(f"looking for fio's best: {settings}")
        settle(bench.pause)
        try:
            return fio.run_fio(settings, path, nbytes)
        finally:
            path.unlink(missing_ok=True)

    try:
        if not bench.with_fio:
            raise BenchError("switched off (--no-fio)")
        if not fio.installed():
            raise BenchError(fio.NOT_INSTALLED)
        return fio.best_write(once)
    except BenchError as error:
        missing["fio"] = str(error)
        return None


def _unsteady(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say so if the durable rows varied much from run to run: the median of the rows."""
    spreads = [row["seconds"] for row in rows if row["group"] == DURABLE]
    factor = statistics.median([spread.high / spread.low for spread in spreads] or [1.0])
    if factor <= _STEADY:
        return []
    note = f"Do not quote this run: the durable rows varied {factor:.1f}-fold (median), so the "
    return [f"{note}disk or the machine was busy with other things."]
