"""`fastserial bench ...`. What needs torch is imported when a command runs."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from fastserial.bench.cli import output
from fastserial.bench.cli.dcp import dcp
from fastserial.bench.cli.deepspeed import deepspeed_command
from fastserial.bench.cli.gil import gil
from fastserial.bench.cli.load import load
from fastserial.bench.cli.model import model, tensor
from fastserial.bench.cli.onefile import onefile
from fastserial.bench.cli.overlap import overlap
from fastserial.bench.cli.plan import plan
from fastserial.bench.cli.profile import profile
from fastserial.bench.cli.scaling import scaling
from fastserial.bench.cli.sweep import sweep
from fastserial.bench.measuring.units import parse_bytes

__all__ = ["bench_app"]

bench_app = typer.Typer(
    help="Measure saves and loads on this machine, with stock torch and fio in the same run.",
    no_args_is_help=True,
)
bench_app.command()(gil)
bench_app.command()(load)
bench_app.command()(overlap)
bench_app.command()(profile)
bench_app.command()(sweep)
bench_app.command("deepspeed")(deepspeed_command)
bench_app.command()(onefile)
bench_app.command()(dcp)
bench_app.command()(tensor)
bench_app.command()(model)
bench_app.command()(scaling)
bench_app.command()(plan)


class Container(str, Enum):
    """torch's two file formats."""

    zip = "zip"
    legacy = "legacy"


@bench_app.command()
def save(
    folder: output.Folder,
    size: Annotated[str, typer.Option(help="Size of the state dict.")] = "3GiB",
    tensors: output.Tensors = 300,
    runs: output.Runs = 5,
    formats: Annotated[
        list[Container] | None, typer.Option("--format", help="May be given twice; default both.")
    ] = None,
    overwriting: Annotated[
        bool, typer.Option("--overwrite/--no-overwrite", help="Also save over an existing file.")
    ] = True,
    small: Annotated[
        bool, typer.Option("--small/--no-small", help="Also the small cases and the start.")
    ] = True,
    with_fio: output.WithFio = True,
    lines: output.WithLines = False,
    json_file: output.JsonFile = None,
    csv_file: output.CsvFile = None,
    plot_file: output.PlotFile = None,
) -> None:
    """Save a checkpoint with stock torch and fastserial, interleaved, fio among them.

    Every durable row includes the fsync of file and directory. Options of fastserial are taken
    from FASTSERIAL_* variables. Exit status 1 if a file differs from stock torch's.
    """
    nbytes = parse_bytes(size)
    outputs = output.Outputs(json_file, csv_file, plot_file)
    outputs.check()

    from fastserial.bench.presenting.export import save_as_json
    from fastserial.bench.presenting.save_view import caption, show_save
    from fastserial.bench.studies.save import SaveBench, run_save
    from fastserial.console import new_console

    bench = SaveBench(
        folder,
        tuple(container.value for container in dict.fromkeys(formats or Container)),
        runs,
        with_fio=with_fio,
        nbytes=nbytes,
        tensors=tensors,
        overwriting=overwriting,
        small=small,
    )
    console = new_console()
    with output.progress(console) as show:
        result = run_save(bench, show)
    show_save(result, console, lines)
    found = result.comparison
    outputs.write("save", found.lines, save_as_json(result), caption(found))
    raise typer.Exit(0 if result.right else 1)
