"""`fastserial bench load`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastserial.bench.cli.output import CsvFile, JsonFile, Outputs, PlotFile, WithLines
from fastserial.bench.measuring.units import parse_bytes

__all__ = ["load"]


def load(
    folder: Annotated[Path, typer.Option(help="Where to write; its disk is what is measured.")],
    size: Annotated[str, typer.Option(help="Size of the state dict.")] = "3GiB",
    tensors: Annotated[int, typer.Option(min=1, help="Tensors of mixed sizes in it.")] = 300,
    runs: Annotated[int, typer.Option(min=1, help="Rounds, after one warm-up.")] = 5,
    small: Annotated[bool, typer.Option("--small/--no-small", help="Also many small ones.")] = True,
    peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Also other packages that are installed.")
    ] = True,
    with_fio: Annotated[bool, typer.Option("--fio/--no-fio", help="Compare with fio.")] = True,
    lines: WithLines = False,
    json_file: JsonFile = None,
    csv_file: CsvFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Load a checkpoint with stock torch, fastserial and others, interleaved, beside fio.

    Cold: nothing of the file is in the page cache; warm: all of it is. What is loaded is compared
    with what was saved; exit status 1 if it differs.
    """
    nbytes = parse_bytes(size)
    outputs = Outputs(json_file, csv_file, plot_file)
    outputs.check()

    from fastserial.bench.presenting.load_view import (
        load_as_json,
        load_caption,
        load_lines,
        show_load,
    )
    from fastserial.bench.studies.load import LoadBench, run_load
    from fastserial.console import new_console

    bench = LoadBench(folder, nbytes, tensors, runs, small, peers, with_fio)
    console = new_console()
    with console.status("") as status:
        result = run_load(bench, status.update)
    show_load(result, console, lines)
    outputs.write("load", load_lines(result), load_as_json(result), load_caption(result))
    raise typer.Exit(0 if result.equal else 1)
