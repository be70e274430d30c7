"""`fastserial bench dcp`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from fastserial.bench.cli import output
from fastserial.bench.measuring.units import parse_bytes

__all__ = ["dcp"]


class Case(str, Enum):
    """What is saved and loaded."""

    MIXED = "mixed"
    SMALL = "small"
    SMALL_SHARDS = "small-shards"
    PLANNING = "planning"


def dcp(
    folder: output.Folder,
    ranks: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Processes on this machine; default 1, then 2, then 4."),
    ] = None,
    case: Annotated[
        list[Case] | None, typer.Option(help="Only these states; may be given again.")
    ] = None,
    size: Annotated[str, typer.Option(help="Size of the state of mixed sizes.")] = "1GiB",
    tensors: output.Tensors = 300,
    small: Annotated[int, typer.Option(min=1, help="Tensors of 32 B in the small states.")] = 3000,
    planned: Annotated[int, typer.Option(min=1, help="Tensors that are planned.")] = 4000,
    runs: output.Runs = 3,
    with_fio: output.WithFio = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write everything to this file.")
    ] = None,
) -> None:
    """Save and load with torch.distributed.checkpoint: stock in its settings, fastserial, and fio.

    All saves are durable, loads begin with nothing in the page cache; times are those of the
    slowest rank. Exit status 1 if a loaded state differs.
    """
    output.check_files(json_file)

    from fastserial.bench.presenting.dcp_view import results_as_json, show_results
    from fastserial.bench.presenting.export import write_json
    from fastserial.bench.studies.dcp import run_dcp
    from fastserial.bench.studies.dcp_plan import DcpBench
    from fastserial.console import new_console

    bench = DcpBench(
        str(folder),
        tuple(one.value for one in dict.fromkeys(case or Case)),
        parse_bytes(size),
        tensors,
        small,
        planned,
        tuple(dict.fromkeys(ranks or (1, 2, 4))),
        runs,
        with_fio,
    )
    console = new_console()
    with output.progress(console) as show:
        result = run_dcp(bench, show)
    show_results(bench, result, console)
    if json_file is not None:
        write_json(json_file, results_as_json(bench, result))
    raise typer.Exit(int(not result.right))
