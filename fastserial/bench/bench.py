"""What `bench save` and `bench load` share: the settings, and from rows to a result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastserial.bench import fio
from fastserial.bench.measure import BenchError, Sample
from fastserial.bench.rotation import Row, rotate, summarize
from fastserial.bench.table import Column, Result, Table


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
        """Return the settings with which fio is fastest; None, and why in `missing`, without fio.

        Args:
            once: runs fio once, as `fastserial.bench.fio.best` has it.
        """
        try:
            if not self.with_fio:
                raise BenchError("switched off (--no-fio)")
            return fio.best(once)
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
