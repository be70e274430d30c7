"""`fastserial bench overlap`."""

from __future__ import annotations

from typing import Annotated

import typer

from fastserial.bench.cli import output

__all__ = ["overlap"]


def overlap(
    folder: output.Folder,
    model: Annotated[
        str, typer.Option(help="Size of the GPT: tiny, mini, small (GPT-2's), medium, large.")
    ] = "small",
    tokens: Annotated[int, typer.Option(min=2, help="Length of a sequence.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 2,
    every: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = 4,
    saves: Annotated[int, typer.Option(min=1, help="Checkpoints of a run.")] = 2,
    runs: output.Runs = 3,
    device: Annotated[str, typer.Option(help="Where to train: cpu, cuda, ...")] = "cpu",
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Threads that compute; the other cores are left to the writer."),
    ] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(help="Only ways to save with this in their names; may be given again."),
    ] = None,
    json_file: output.JsonFile = None,
    plot_file: output.PlotFile = None,
) -> None:
    """Train a GPT with checkpoints, and show the seconds that each of them costs.

    Lost are the seconds that the whole run takes longer than the runs without checkpoints before
    and after it, slowed steps and the wait for the last checkpoint included; the first row has
    none, and shows how much is noise. Exit status 1 if one of fastserial's is wrong.
    """
    output.Outputs(json_file, None, plot_file).check()

    from fastserial.bench.presenting.export import write_json
    from fastserial.bench.presenting.overlap_view import (
        overlap_as_json,
        plot_overlap,
        show_overlap,
    )
    from fastserial.bench.studies.overlap import OverlapBench, run_overlap
    from fastserial.console import new_console

    only = tuple(way or ())
    bench = OverlapBench(folder, model, tokens, batch, every, saves, runs, device, threads, only)
    console = new_console()
    with output.progress(console) as show:
        result = run_overlap(bench, show)
    show_overlap(result, console)
    if json_file is not None:
        write_json(json_file, overlap_as_json(result))
    if plot_file is not None:
        plot_overlap(result, plot_file)
        console.print(f"drawn: {plot_file}", soft_wrap=True, markup=False)
    raise typer.Exit(0 if result.right else 1)
