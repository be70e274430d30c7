"""`fastserial bench scaling`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fastserial.bench.cli import output
from fastserial.bench.measuring.units import parse_bytes

__all__ = ["scaling"]


def scaling(
    folder: output.Folder,
    max_size: Annotated[str, typer.Option(help="The largest checkpoint; first is 1 KiB.")] = "1GiB",
    max_tensors: Annotated[int, typer.Option(min=1, help="The most tensors.")] = 200_000,
    total: Annotated[str, typer.Option(help="Bytes of the many tensors together.")] = "256MiB",
    runs: Annotated[int, typer.Option(min=1, help="Rounds at each point, after a warm-up.")] = 5,
    plot: Annotated[
        Path | None,
        typer.Option(help="Also write PREFIX-size.png, PREFIX-tensors.png and PREFIX.csv."),
    ] = None,
    csv_file: output.CsvFile = None,
    json_file: output.JsonFile = None,
) -> None:
    """Measure saves against checkpoint size, and against the number of tensors.

    Rows: fastserial zip, stock zip and safetensors, each with its fsync, interleaved.
    """
    max_bytes, total_bytes = parse_bytes(max_size), parse_bytes(total)
    if plot is not None and csv_file is None:
        csv_file = plot.with_name(f"{plot.name}.csv")

    from fastserial.bench.presenting.export import write_csv, write_json
    from fastserial.bench.presenting.scaling_view import (
        plot_scaling,
        scaling_as_json,
        scaling_cells,
        scaling_plots,
        show_scaling,
    )
    from fastserial.bench.studies.scaling import ScalingBench, run_scaling
    from fastserial.console import new_console

    output.Outputs(json_file, csv_file, plot and scaling_plots(plot)["size"]).check()
    bench = ScalingBench(folder, max_bytes, max_tensors, total_bytes, runs)
    console = new_console()
    with output.progress(console) as show:
        result = run_scaling(bench, show)
    show_scaling(result, console)
    if csv_file is not None:
        write_csv(csv_file, list(scaling_cells(result)))
    if json_file is not None:
        write_json(json_file, scaling_as_json(result))
    if plot is not None:
        for path in plot_scaling(result, plot):
            console.print(f"drawn: {path}", soft_wrap=True, markup=False)
    raise typer.Exit(0 if result.right else 1)
