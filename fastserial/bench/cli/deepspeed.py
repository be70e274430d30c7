"""`fastserial bench deepspeed`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastserial.bench.cli import output
from fastserial.bench.cli.model import ModelName
from fastserial.bench.studies.deepspeed import run_deepspeed
from fastserial.bench.studies.deepspeed_plan import DeepSpeedBench

__all__ = ["deepspeed_command"]


def deepspeed_command(
    folder: output.Folder,
    model: ModelName = "gpt2",
    zero_stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage.")] = 1,
    world_size: Annotated[int, typer.Option(min=1, help="Processes on this machine.")] = 1,
    runs: output.Runs = 3,
    legacy: Annotated[bool, typer.Option(help="The legacy format instead of zip.")] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write everything to this file.")
    ] = None,
) -> None:
    """Save a checkpoint of a DeepSpeed run: stock, DeepSpeed's fast writer, fastserial.

    All rows are durable; times are those of the slowest rank. Exit status 1 if a file differs from
    stock DeepSpeed's.
    """
    output.check_files(json_file)

    from fastserial.bench.presenting.deepspeed_view import results_as_json, show_results
    from fastserial.bench.presenting.export import write_json
    from fastserial.console import new_console

    bench = DeepSpeedBench(model, str(folder), zero_stage, world_size, runs, legacy)
    console = new_console()
    with output.progress(console) as show:
        show("training one step, then saving")
        results = run_deepspeed(bench)
    show_results(bench, results, console)
    if json_file is not None:
        write_json(json_file, results_as_json(bench, results))
    raise typer.Exit(int(any(result.identical is False for result in results)))
