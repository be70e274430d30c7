"""What the benchmarks can give besides their table: the options, and what they do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fastserial.bench.measuring.errors import BenchError
from fastserial.console import say

if TYPE_CHECKING:
    from rich.console import Console

    from fastserial.bench.measuring.summary import Line

__all__ = ["CsvFile", "Folder", "JsonFile", "Outputs", "Peers", "PlotFile", "Runs", "Tensors"]
__all__ += ["WithFio", "WithLines", "check_files", "progress"]

Folder = Annotated[Path, typer.Option(help="Where to write; its disk is what is measured.")]
Runs = Annotated[int, typer.Option(min=1, help="Rounds, after one warm-up.")]
Tensors = Annotated[int, typer.Option(min=1, help="Tensors of mixed sizes in it.")]
Peers = Annotated[bool, typer.Option("--peers/--no-peers", help="Also other engines and packages.")]
WithFio = Annotated[bool, typer.Option("--fio/--no-fio", help="Compare with fio.")]
WithLines = Annotated[bool, typer.Option("--lines", help="Also one line per row, as fio's.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Also write everything to this file, in fio's format.")
]
CsvFile = Annotated[Path | None, typer.Option("--csv", help="Also write the rows to this file.")]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", help="Also draw the rows: out.png, .svg or .pdf.")
]
_SILENCE = 20.0  # seconds


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str], None]]:
    """Yield what shows a line of text: what is being measured now.

    On a terminal it replaces the line before. Elsewhere standard error gets one from time to time.
    """
    from rich.console import Console

    terminals = (one for one in (console, Console(stderr=True)) if one.is_terminal)
    terminal = next(terminals, None)
    if terminal is not None:
        with terminal.status("") as status:
            yield lambda text: status.update(escape(text))
        return
    shown = monotonic()

    def show(text: str) -> None:
        nonlocal shown
        if monotonic() - shown >= _SILENCE:
            shown = monotonic()
            say(text, err=True)

    yield show


def check_files(*paths: Path | None) -> None:
    """Check before measuring that these files can be written after it.

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
        """Check before measuring that everything can be written after it.

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
