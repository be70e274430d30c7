"""`fastserial bench profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastserial.bench.cli import output
from fastserial.bench.measuring.units import parse_bytes

__all__ = ["profile"]


def profile(
    folder: output.Folder,
    size: Annotated[str, typer.Option(help="Size of the state dict.")] = "1GiB",
    tensors: output.Tensors = 300,
    runs: Annotated[int, typer.Option(min=1, help="Profiled saves, after one warm-up.")] = 3,
    legacy: Annotated[bool, typer.Option("--legacy", help="torch's legacy format.")] = False,
    device: Annotated[str, typer.Option(help="Where the tensors are: cpu, cuda, ...")] = "cpu",
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a trace for ui.perfetto.dev or chrome://tracing here."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write everything to this file.")
    ] = None,
) -> None:
    """Show where one save spends its time, step by step and thread by thread.

    Settings are those in force for the folder. Exit status 1 if a file differs from stock torch's.
    """
    nbytes = parse_bytes(size)
    output.check_files(trace, json_file)

    from fastserial.bench.presenting.export import write_json
    from fastserial.bench.presenting.profile_view import profile_as_json, show_profile
    from fastserial.bench.studies.profile import ProfileBench, run_profile
    from fastserial.console import new_console

    bench = ProfileBench(folder, nbytes, tensors, runs, "legacy" if legacy else "zip", device)
    console = new_console()
    with output.progress(console) as show:
        result = run_profile(bench, show)
    show_profile(result, console)
    if trace is not None:
        write_json(trace, result.trace)
    if json_file is not None:
        write_json(json_file, profile_as_json(result))
    raise typer.Exit(0 if result.identical else 1)
