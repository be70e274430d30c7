"""What the benchmarks can give besides their table: the options, and what they do."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fastserial.bench.measuring.errors import BenchError

if TYPE_CHECKING:
    from fastserial.bench.measuring.summary import Line

__all__ = ["CsvFile", "JsonFile", "Outputs", "PlotFile", "WithLines", "check_files"]

WithLines = Annotated[bool, typer.Option("--lines", help="Also one line per row, as fio's.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Also write everything to this file, in fio's shape.")
]
CsvFile = Annotated[Path | None, typer.Option("--csv", help="Also write the rows to this file.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Also draw the rows: out.png, .svg or .pdf.")
]


def check_files(*paths: Path | None) -> None:
    """Find out before the measuring that one of these files cannot be written after it.

    Raises:
        BenchError: its folder is missing, or it cannot be written.
    """
    for path in paths:
        if path is None:
            continue
        if not path.parent.is_dir():
            raise BenchError(f"{path.parent} is not a directory; create it first")
        if path.is_dir():
            raise BenchError(f"{path} is a directory: give the name of a file")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise BenchError(f"{path} cannot be written: look at owner and mode, or give another")


@dataclass(frozen=True, slots=True)
class Outputs:
    """The files to write, each None if it is not wanted."""

    json_file: Path | None = None
    csv_file: Path | None = None
    plot_file: Path | None = None

    def check(self) -> None:
        """Find out before the measuring that something cannot be written after it.

        Raises:
            BenchError: a folder is missing or not writable, or matplotlib is missing.
        """
        check_files(self.json_file, self.csv_file, self.plot_file)
        if self.plot_file is not None:
            from fastserial.bench.presenting.plot import check_plot

            check_plot(self.plot_file)

    def write(
        self,
        benchmark: str,
        lines: Sequence[Line],
        content: Mapping[str, Any],
        caption: str,
    ) -> None:
        """Write the files: the rows, everything as JSON, and the words below a plot's title.

        Raises:
            OSError: a file cannot be written.
        """
        from fastserial.bench.presenting.export import line_as_cells, write_csv, write_json

        if self.json_file is not None:
            write_json(self.json_file, content)
        if self.csv_file is not None:
            write_csv(self.csv_file, [line_as_cells(benchmark, line) for line in lines])
        if self.plot_file is not None:
            from fastserial.bench.presenting.plot import plot_lines

            plot_lines(self.plot_file, lines, f"fastserial bench {benchmark}: one run", caption)
