"""The results of a sweep as CSV, one line each, written as soon as it is there."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from fastserial.bench.measuring.errors import BenchError
from fastserial.config import Config
from fastserial.config.performance import KiB, MiB

__all__ = ["Point", "Result", "SweepFile", "format_size"]


@dataclass(frozen=True, slots=True)
class Point:
    """One combination.

    Attributes:
        op: `write` or `read`.
        transfer: the transfer type, as in `fastserial.Config`; `cpu`: host memory.
        engine, block_size, queue_depth, threads: as in `fastserial.Config`.
    """

    op: str
    transfer: str
    engine: str
    block_size: int
    queue_depth: int
    threads: int

    @classmethod
    def of_defaults(cls, op: str, transfer: str) -> Point:
        """Return the default settings for a kind of transfer."""
        config = Config()
        counts = config.block_size, config.queue_depth, config.threads
        return cls(op, transfer, str(config.engine), *counts)

    def __str__(self) -> str:
        return (
            f"{self.op} {self.transfer} block_size={format_size(self.block_size)} "
            f"queue_depth={self.queue_depth} threads={self.threads} engine={self.engine}"
        )


def format_size(nbytes: int) -> str:
    """Return a size as options take it: `format_size(2097152)` is `2MiB`, 524288 `512KiB`."""
    if nbytes % MiB == 0:
        return f"{nbytes // MiB}MiB"
    return f"{nbytes // KiB}KiB" if nbytes % KiB == 0 else str(nbytes)


@dataclass(frozen=True, slots=True)
class Result:
    """What one transfer took.

    Attributes:
        run: counts from 0.
        bandwidth: bytes per second; 0 if the engine could not run (`error` says why).
        ratio: over the bandwidth of the defaults, median of their runs shortly before.
        p50, p95, p99: of the latencies of its blocks, in seconds.
        fallback: why it did not go the fastest way.
        when: date and time, ISO 8601.
        fastserial: version that measured.
    """

    run: int
    point: Point
    seconds: float
    bandwidth: float
    ratio: float
    cpu_seconds: float
    p50: float
    p95: float
    p99: float
    fallback: str
    error: str
    when: str
    fastserial: str


# Column: which attribute of a result it holds, in what unit, with how many digits.
_NUMBERS = {
    "seconds": ("seconds", 1.0, 6),
    "bw_bytes": ("bandwidth", 1.0, 0),
    "ratio_to_default": ("ratio", 1.0, 4),
    "cpu_seconds": ("cpu_seconds", 1.0, 6),
    "lat_p50_us": ("p50", 1e-6, 1),
    "lat_p95_us": ("p95", 1e-6, 1),
    "lat_p99_us": ("p99", 1e-6, 1),
}
_TEXTS = ("fallback", "error", "when", "fastserial")
_POINT = tuple(field.name for field in fields(Point))
_COLUMNS = ("folder", "bytes", "run", *_POINT, *_NUMBERS, *_TEXTS)


class SweepFile:
    """A CSV file that holds results, and takes more. A line that was cut short is done again."""

    def __init__(self, path: Path, folder: str, nbytes: int) -> None:
        """Open the file, or make it.

        Args:
            path: of the file.
            folder: that is written to.
            nbytes: of each transfer.

        Raises:
            BenchError: it holds something else, or results of another folder or size.
            OSError: it cannot be read or written.
        """
        self.results: list[Result] = []
        self._same = {"folder": folder, "bytes": nbytes}
        there = path.read_bytes() if path.exists() else b""
        whole = there[: there.rfind(b"\n") + 1]
        if there:  # first: what is not ours stays as it is
            self._read(path, whole.decode(errors="replace"))
        self._file = path.open("ab")
        self._file.truncate(len(whole))
        if not whole:
            self._line(_COLUMNS)

    def add(self, result: Result) -> None:
        """Add a result, so that it is there after this process was killed.

        Raises:
            OSError: the file cannot be written.
        """
        numbers = (
            f"{getattr(result, name) / unit:.{digits}f}" for name, unit, digits in _NUMBERS.values()
        )
        texts = (getattr(result, name) for name in _TEXTS)
        self._line((*self._same.values(), result.run, *astuple(result.point), *numbers, *texts))
        self.results.append(result)

    def _line(self, values: Sequence[Any]) -> None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(
            [str(value).replace("\n", " ") for value in values]
        )
        self._file.write(text.getvalue().encode())
        self._file.flush()

    def _read(self, path: Path, text: str) -> None:
        rows = csv.DictReader(io.StringIO(text))
        if tuple(rows.fieldnames or ()) != _COLUMNS:
            raise BenchError(f"{path} holds something else: give another --csv")
        for number, row in enumerate(rows, 2):
            try:
                same = {"folder": row["folder"], "bytes": int(row["bytes"])}
                result = _result(row)
            except (ValueError, TypeError) as error:
                raise BenchError(f"{path}, line {number}: {error}") from error
            if same != self._same:
                raise BenchError(
                    f"{path} is of {same['bytes']} bytes in {same['folder']}, not of "
                    f"{self._same['bytes']} in {self._same['folder']}: give another --csv"
                )
            self.results.append(result)

    def close(self) -> None:
        """Put everything on the device, and close the file."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> SweepFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _result(row: dict[str, str]) -> Result:
    counts = (int(row[name]) for name in ("block_size", "queue_depth", "threads"))
    point = Point(row["op"], row["transfer"], row["engine"], *counts)
    values: dict[str, Any] = {name: row[name] for name in _TEXTS}
    for column, (name, unit, _) in _NUMBERS.items():
        values[name] = float(row[column]) * unit
    return Result(int(row["run"]), point, **values)
