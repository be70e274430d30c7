"""Results: tables that print, and that go into a JSON file; the same for every benchmark.

A row is a mapping of plain values and of `Spread`s; lists and mappings in it are for JSON alone.
Its key `problem`, where it has one, says why there is nothing else in it. A result has the machine
where it ran: a number without its machine says nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fastserial import __version__
from fastserial.bench.measure import MB, BenchError
from fastserial.config import current
from fastserial.console import print_table, say
from fastserial.diagnosis.folder import probe_folder
from fastserial.files.linux import meminfo
from fastserial.reports import format_bytes

UNKNOWN = "–"
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with its least and greatest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of at least one value: `Spread.of([3, 1, 2]) == Spread(2, 1, 3)`."""
        found = sorted(values)
        return cls(statistics.median(found), found[0], found[-1])


def ratio(
    seconds: Sequence[float], base: Sequence[float] | None, scale: float = 1.0
) -> Spread | None:
    """Return how many times as fast as another row one was, run by run of the same round.

    Args:
        seconds: of each run; `base`: those of the other row, if there is one.
        scale: how many times as many bytes this row moved.
    """
    if not seconds or not base:
        return None
    pairs = zip(seconds, base, strict=True)
    return Spread.of(theirs / mine * scale for mine, theirs in pairs)


def number(unit: float = 1.0, digits: int = 0) -> Callable[[Any], str]:
    """Return what shows a number or a `Spread` in units of `unit`: `2.5 (2.0–3.1)`."""

    def show(value: Any) -> str:
        if value is None:
            return UNKNOWN
        if isinstance(value, Spread):
            low, middle, high = (show(one) for one in (value.low, value.median, value.high))
            return f"{middle} ({low}–{high})"
        return f"{value / unit:,.{digits}f}"

    return show


def size(nbytes: int | None) -> str:
    """Return a number of bytes for people."""
    return UNKNOWN if nbytes is None else format_bytes(nbytes)


def verdict(right: bool | None) -> str:
    """Return whether something is right, for people."""
    return {None: UNKNOWN, True: "yes", False: "NO"}[right]


@dataclass(frozen=True, slots=True)
class Column:
    """What of a row is shown: the value of a key, under a head, made text by `show`."""

    key: str
    head: str
    show: Callable[[Any], str] = str


_RATIO = number(1, 2)
MEASURED = (
    Column("bytes_per_second", "MB/s", number(MB)),
    Column("to_fio", "× fio", _RATIO),
    Column("to_stock", "× stock", _RATIO),
    Column("cpu_seconds_per_gb", "CPU s/GB", _RATIO),
    Column("extra_bytes", "extra memory", size),
)
CHECKED = (
    Column("identical", "stock's bytes", verdict),
    Column("equal", "read back", verdict),
)


class Table:
    """Rows that print, and go into JSON.

    Example:
        `Table([{"name": "stock", "seconds": 1.5}], [Column("seconds", "s", number())])`
    """

    def __init__(self, rows: Sequence[Row], columns: Sequence[Column], title: str = "") -> None:
        """Make it.

        Args:
            rows: each with a `name`; those with the same `group`, if any, stand together.
            columns: what is printed of them behind their names.
            title: what the rows have in common.
        """
        self.rows = list(rows)
        self.title = title
        self._columns = list(columns)

    @property
    def right(self) -> bool:
        """Whether nothing wrong was found in what the rows wrote or read."""
        return not any(
            row.get("identical") is False or row.get("equal") is False for row in self.rows
        )

    def show(self) -> None:
        """Print the table."""
        if self.title:
            say(self.title)
        lines: list[Sequence[str]] = []
        for group in dict.fromkeys(row.get("group") for row in self.rows):
            if group is not None:
                lines.append([group, *("" for _ in self._columns)])
            indent = "  " * (group is not None)
            rows = [row for row in self.rows if row.get("group") == group]
            lines += [[f"{indent}{row['name']}", *self._cells(row)] for row in rows]
        print_table(["", *(column.head for column in self._columns)], lines)

    def _cells(self, row: Row) -> list[str]:
        if row.get("problem"):
            return [str(row["problem"]), *("" for _ in self._columns[1:])]
        return [column.show(row.get(column.key)) for column in self._columns]


@dataclass
class Result:
    """What a benchmark found, and where.

    Attributes:
        benchmark: its name.
        folder: where it measured.
        caption: what was measured, and how.
        settings: what was requested.
        tables: the rows.
        missing: rows that are not there, and why: with the command that installs them.
        notes: what a reader of the figures must know.
        more: what only the JSON has.
    """

    benchmark: str
    folder: Path
    caption: str
    settings: Mapping[str, Any]
    tables: Sequence[Table]
    missing: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Whether nothing wrong was found in what was written or read."""
        return all(table.right for table in self.tables)

    def where(self) -> list[str]:
        """Return machine, folder, and what was measured, line by line."""
        machine, folder = this_machine(), probe_folder(self.folder)
        versions = ", ".join(
            f"{name} {machine[name]}" for name in ("python", "torch", "fastserial")
        )
        processor = f"{machine['cpu']}, {machine['cores']} cores"
        memory = f"{size(machine['memory_bytes'])} memory"
        disk = f"{folder.file_system} on {folder.device or 'no block device'}"
        return [
            f"{processor}, {memory}, {machine['kernel']}, {versions}",
            f"{disk}, {size(folder.free_bytes)} free",
            self.caption,
        ]

    def show(self) -> None:
        """Print where it ran, what is missing, the tables, and the notes."""
        for text in self.where():
            say(text)
        say("options: " + ", ".join(f"{name}={value}" for name, value in _options().items()))
        for name, why in self.missing.items():
            say(f"without {name}: {why}")
        for table in self.tables:
            table.show()
        for note in self.notes:
            say(note)
        if not self.right:
            say("Something that was written or read is WRONG.")

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values: sizes in bytes, times in seconds."""
        return {
            "benchmark": self.benchmark,
            "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "machine": this_machine(),
            "folder": dataclasses.asdict(probe_folder(self.folder)),
            "options": _options(),
            "settings": dict(self.settings),
            "caption": self.caption,
            "missing": dict(self.missing),
            "notes": list(self.notes),
            "tables": [{"title": table.title, "rows": table.rows} for table in self.tables],
            **self.more,
        }

    def write(self, path: Path | None) -> None:
        """Write everything to a JSON file, if one is wanted.

        Raises:
            OSError: it cannot be written.
        """
        if path is not None:
            text = json.dumps(self.as_json(), indent=2, default=_plain)
            path.write_text(text + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if isinstance(value, Spread) else str(value)


def _options() -> dict[str, Any]:
    """Return fastserial's options in force that are text or numbers; the rest get reports."""
    values = dataclasses.asdict(current())
    return {name: one for name, one in values.items() if isinstance(one, str | int | float)}


def check_files(*paths: Path | None) -> None:
    """Check before measuring that these files can be written after it.

    Raises:
        BenchError: one cannot be.
    """
    for path in filter(None, paths):
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise BenchError(
                f"{path} cannot be written: give the name of a file in a folder that exists and "
                "that you may write to"
            )


def this_machine() -> dict[str, Any]:
    """Return processor, cores this process may use, memory (bytes), and versions."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": meminfo().get("MemTotal", 0),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "fastserial": __version__,
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    return platform.processor() or platform.machine()
