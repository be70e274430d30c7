"""`fastserial bench load`."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from fastserial.bench.cli import output
from fastserial.bench.measuring.units import parse_bytes

__all__ = ["load"]


class Temperature(str, Enum):
    """What of the file is in the page cache, and where the memory for it comes from."""

    COLD = "cold"
    WARM = "warm"
    FRESH = "fresh"


def load(
    folder: output.Folder,
    size: Annotated[str, typer.Option(help="Size of the state dict.")] = "3GiB",
    tensors: output.Tensors = 300,
    runs: output.Runs = 5,
    small: Annotated[bool, typer.Option("--small/--no-small", help="Also many small ones.")] = True,
    peers: output.Peers = True,
    with_fio: output.WithFio = True,
    temperature: Annotated[
        list[Temperature] | None, typer.Option(help="Only these rows; may be repeated.")
    ] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Load to the CUDA device.")] = False,
    lines: output.WithLines = False,
    json_file: output.JsonFile = None,
    csv_file: output.CsvFile = None,
    plot_file: output.PlotFile = None,
) -> None:
    """Load a checkpoint with stock torch, fastserial and others, interleaved, fio among them.

    Cold: nothing of the file is in the page cache; warm: all of it is; fresh: warm, and the memory
    was not used for a while. What is loaded is compared with what was saved; exit status 1 if it
    differs.
    """
    nbytes = parse_bytes(size)
    outputs = output.Outputs(json_file, csv_file, plot_file)
    outputs.check()

    from fastserial.bench.presenting.load_view import (
        load_as_json,
        load_caption,
        load_lines,
        show_load,
    )
    from fastserial.bench.studies.load import TEMPERATURES, LoadBench, run_load
    from fastserial.console import new_console

    names = dict(zip(Temperature, TEMPERATURES, strict=True))
    chosen = tuple(names[one] for one in temperature or Temperature)
    bench = LoadBench(folder, nbytes, tensors, runs, small, peers, with_fio, chosen, gpu=gpu)
    console = new_console()
    with output.progress(console) as show:
        result = run_load(bench, show)
    show_load(result, console, lines)
    outputs.write("load", load_lines(result), load_as_json(result), load_caption(result))
    raise typer.Exit(0 if result.equal else 1)
