"""`fastserial bench plan`."""

from __future__ import annotations

from typing import Annotated

import typer

from fastserial.bench.cli import output

__all__ = ["plan"]


def plan(
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the job.")] = 512,
    tensors: Annotated[int, typer.Option(min=100, help="Tensors of the state, about.")] = 20_000,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Ranks that share a layer.")] = 8,
    stages: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 2,
    every: Annotated[int, typer.Option(min=1, help="Look at every so many-th rank.")] = 171,
    writers: Annotated[int, typer.Option(min=0, help="Ranks that write; 0: all.")] = 0,
    json_file: output.JsonFile = None,
) -> None:
    """Plan a distributed save of a 405 B model on many ranks, without the ranks.

    Tells of some ranks how long planning takes, and how much they exchange with how many others.
    """
    output.check_files(json_file)

    from fastserial.bench.presenting.export import write_json
    from fastserial.bench.presenting.planning_view import planning_as_json, show_planning
    from fastserial.bench.studies.planning import PlanBench, run_planning
    from fastserial.console import new_console

    bench = PlanBench(ranks, tensors, tensor_parallel, stages, every, writers)
    console = new_console()
    with output.progress(console) as show:
        result = run_planning(bench, show)
    show_planning(result, console)
    if json_file is not None:
        write_json(json_file, planning_as_json(result))
