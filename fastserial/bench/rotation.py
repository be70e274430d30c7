"""Rows run interleaved, A B C A B C, so that drift of the machine affects all of them alike.

`Bench` is what `bench save` and `bench load` share: the settings, and from rows to a result.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fastserial.bench import fio
from fastserial.bench.measure import GB, BenchError, Sample
from fastserial.bench.payload import digest
from fastserial.bench.state import settle
from fastserial.bench.table import Column, Result, Spread, Table, ratio

# Groups: rows of one group have the same guarantee, and only they are compared.
DURABLE = "durable"
OVERWRITE = "durable, overwriting"
LOOSE = "not durable"
GROUPS = (DURABLE, OVERWRITE, LOOSE)  # of saves
COLD = "cold"
_WITH_THE_DISK = (DURABLE, OVERWRITE, COLD)  # what fio does, too
# One stem for all: the archive name, and with it the bytes of a zip, depends on it.
_STEM = "checkpoint"


@dataclass(frozen=True, slots=True)
class Row:
    """How to write or read one checkpoint.

    Attributes:
        name: what is measured.
        group: rows with the same guarantee, which alone are compared. Those of `OVERWRITE` write
            over the file that the last one of them left.
        run: writes a file or a directory at a path (or reads a file of its own) and returns what
            that took.
        stock: name of the row of stock torch that this one is compared with.
        same_bytes_as: name of a row above whose file this one's must equal.
        check: reads back what was written and returns whether it equals what was to be written;
            for formats that are compared by their content, not by their bytes.
        optional: a `BenchError` in its first run leaves the row out; it does not end the run.
    """

    name: str
    group: str
    run: Callable[[Path], Sample]
    stock: str | None = None
    same_bytes_as: str | None = None
    check: Callable[[Path], bool] | None = None
    optional: bool = False


@dataclass(slots=True)
class Measured:
    """A row and its sample of each round.

    Attributes:
        identical: whether its files held the right bytes; None if there is nothing to compare.
        equal: whether what was read back equals what was written; None if not read back.
        problem: why an optional row cannot run here.
    """

    row: Row
    samples: list[Sample] = field(default_factory=list)
    identical: bool | None = None
    equal: bool | None = None
    problem: str | None = None


def rotate(
    rows: Sequence[Row],
    folder: Path,
    runs: int,
    pause: float = 0.3,
    say: Callable[[str], None] = lambda text: None,
) -> list[Measured]:
    """Run all rows in turn and return their samples of `runs` rounds, after one to warm up.

    Before each run all dirty pages are written back, and `pause` seconds pass. Each run writes a
    name that was never used before, or overwrites, as its group says. Bytes and contents are
    compared in the first and in the last round. `say` receives a text for each run.
    """
    measured = [Measured(row) for row in rows]
    wanted = {row.same_bytes_as for row in rows}
    digests: dict[str, str] = {}
    overwritten = folder / f"{_STEM}.overwritten"
    for turn in range(runs + 1):
        label = f"round {turn}/{runs}" if turn else "warm-up"
        for index, one in enumerate(measured):
            row = one.row
            if one.problem is not None:
                continue
            say(f"{label}: {row.name}")
            overwrites = row.group == OVERWRITE
            path = overwritten if overwrites else folder / f"{_STEM}.{turn}-{index}"
            settle(pause)
            try:
                sample = row.run(path)
            except BenchError as error:
                if turn or not row.optional:
                    raise
                one.problem = str(error)
                continue
            if turn:
                one.samples.append(sample)
            if turn == 0 and row.name in wanted:
                digests[row.name] = digest(path)
            if row.same_bytes_as in digests and turn in (0, runs):
                same = digest(path) == digests[row.same_bytes_as]
                one.identical = same and one.identical is not False
            if row.check is not None and turn in (0, runs):
                one.equal = row.check(path) and one.equal is not False
            if not overwrites:
                _remove(path)
    overwritten.unlink(missing_ok=True)
    return measured


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# -- summary -------------------------------------------------------------------------------------


def summarize(measured: Sequence[Measured], fio: str | None = None) -> list[dict[str, Any]]:
    """Return what a table shows of each row that ran.

    Args:
        measured: the rows.
        fio: name of its row, which others are compared with.

    Returns:
        `name`, `group`, `bytes` (of the file), `seconds`, `bytes_per_second`, `to_fio` (None for
        rows that promise less), `to_stock` (1 for stock itself), `cpu_seconds_per_gb`,
        `extra_bytes` (highest peak), `identical`, `equal`, `fallback`, and `runs`: each of them.
    """
    samples = {one.row.name: one.samples for one in measured if one.samples}
    bases = {one.row.stock for one in measured}
    yardstick = samples.get(fio or "")

    def to(base: Sequence[Sample] | None, mine: Sequence[Sample]) -> Spread | None:
        if base is None:
            return None
        scale = mine[-1].nbytes / base[-1].nbytes
        return ratio([run.seconds for run in mine], [run.seconds for run in base], scale)

    rows = []
    for one in (one for one in measured if one.samples):
        row, mine = one.row, one.samples
        stock = samples.get((row.name if row.name in bases else row.stock) or "")
        peaks = [run.extra_bytes for run in mine if run.extra_bytes is not None]
        rows.append(
            {
                "name": row.name,
                "group": row.group,
                "bytes": mine[-1].nbytes,
                "seconds": Spread.of(run.seconds for run in mine),
                "bytes_per_second": Spread.of(run.bandwidth for run in mine),
                "to_fio": to(yardstick if row.group in _WITH_THE_DISK else None, mine),
                "to_stock": to(stock, mine),
                "cpu_seconds_per_gb": Spread.of(run.cpu_seconds / run.nbytes * GB for run in mine),
                "extra_bytes": max(peaks, default=None),
                "identical": one.identical,
                "equal": one.equal,
                "fallback": next((run.fallback for run in mine if run.fallback), None),
                "runs": [dataclasses.asdict(run) for run in mine],
            }
        )
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What to measure, and how.

    Attributes:
        folder: where to write; its disk is what is measured.
        nbytes, tensors: of a state dict of mixed sizes.
        gpu: its tensors are on the CUDA device.
        runs: rounds that count; one warm-up comes before.
        with_fio: compare with fio.
        pause: seconds of rest between two runs.
    """

    folder: Path
    nbytes: int = 3 << 30
    tensors: int = 300
    gpu: bool = False
    runs: int = 5
    with_fio: bool = True
    pause: float = 0.3

    @property
    def device(self) -> str:
        """Where the tensors are."""
        return "cuda" if self.gpu else "cpu"

    def best_of_fio(
        self, once: Callable[[fio.FioSettings], Sample], missing: dict[str, str]
    ) -> fio.FioSettings | None:
        """Return the settings with which fio is fastest; None without fio, and why in `missing`.

        Args:
            once: runs fio once, as `fastserial.bench.fio.best` has it.
        """
        try:
            return fio.best(once) if self.with_fio else None
        except BenchError as error:
            missing["fio"] = str(error)
            return None

    def run(
        self,
        name: str,
        what: str,
        rows: Sequence[Row],
        folder: Path,
        missing: dict[str, str],
        columns: Sequence[Column],
        say: Callable[[str], None],
    ) -> Result:
        """Run rows in turn, and return the table of them.

        Args:
            name: of the benchmark.
            what: what is saved or loaded.
            rows: that of fio is the first, if it is there.
            folder: where they write.
            missing: rows that are not there, and why; those that cannot run are added.
            columns: of the table.
            say: receives a text for each step.

        Raises:
            BenchError: a row that is not optional cannot run.
        """
        measured = rotate(rows, folder, self.runs, self.pause, say)
        missing |= {one.row.name: one.problem for one in measured if one.problem is not None}
        found = summarize(measured, rows[0].name if rows[0].name.startswith("fio") else None)
        caption = (
            f"{what}; medians of {self.runs} interleaved runs (least–greatest); ratios are of runs "
            "of the same round"
        )
        settings: dict[str, Any] = {**asdict(self), "folder": str(self.folder), "subject": what}
        return Result(name, self.folder, caption, settings, [Table(found, columns)], missing)
