"""`fastserial bench onefile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastserial.bench.cli import output
from fastserial.bench.measuring.units import parse_bytes

__all__ = ["onefile"]


def onefile(
    folder: output.Folder,
    ranks: Annotated[int, typer.Option(min=1, help="Processes on this machine.")] = 4,
    size: Annotated[str, typer.Option(help="Size of the whole state.")] = "1GiB",
    tensors: output.Tensors = 300,
    writers: Annotated[
        list[int] | None,
        typer.Option("--writers", min=1, help="How many ranks write; default 1, 2 and 4."),
    ] = None,
    runs: output.Runs = 3,
    with_fio: output.WithFio = True,
    others: Annotated[
        bool, typer.Option("--others/--no-others", help="Also a gather, and DCP.")
    ] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write everything to this file.")
    ] = None,
) -> None:
    """Save one file from many ranks, beside fio with as many jobs, a gather, and DCP.

    All rows are durable; times are those of the slowest rank. Exit status 1 if a file differs from
    that of the gather and stock torch.save.
    """
    output.check_files(json_file)

    from fastserial.bench.presenting.export import write_json
    from fastserial.bench.presenting.onefile_view import results_as_json, show_results
    from fastserial.bench.studies.onefile import run_onefile
    from fastserial.bench.studies.onefile_plan import OneFileBench
    from fastserial.console import new_console

    counts = sorted({count for count in writers or (1, 2, 4) if count <= ranks})
    bench = OneFileBench(
        str(folder), parse_bytes(size), tensors, ranks, counts, runs, with_fio, others
    )
    console = new_console()
    with output.progress(console) as show:
        show("saving in turn")
        results = run_onefile(bench)
    show_results(bench, results, console)
    if json_file is not None:
        write_json(json_file, results_as_json(bench, results))
    raise typer.Exit(int(any(result.identical is False for result in results)))
