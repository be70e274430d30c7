"""The result of `fastserial bench scaling`: table, CSV, JSON, and two plots."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fastserial.bench.presenting.export import head, job, line_as_cells
from fastserial.bench.presenting.plot import new_figure, save_figure, with_errors, wrapped
from fastserial.bench.presenting.save_view import (
    format_ratio,
    show_head,
    table_of,
)
from fastserial.bench.studies.scaling import Axis, Point, ScalingResult
from fastserial.reports import format_bytes

__all__ = ["plot_scaling", "scaling_as_json", "scaling_cells", "scaling_plots", "show_scaling"]

_TITLES: dict[Axis, str] = {
    "size": "checkpoint size, 16 tensors",
    "tensors": "number of tensors, {total} together",
}
_X_LABELS: dict[Axis, str] = {
    "size": "checkpoint size (bytes of tensor data)",
    "tensors": "number of tensors",
}
_MARKERS = ("s", "o", "^")
_FEW_DECADES = 3


def show_scaling(result: ScalingResult, console: Console) -> None:
    """Print where it ran and a table for each curve."""
    show_head(_caption(result), result.place, result.missing, console)
    for axis in _TITLES:
        console.print(_table(result, axis))
    if not result.right:
        console.print("[red]Something that was written is WRONG: see --json.[/red]")


def scaling_as_json(result: ScalingResult) -> dict[str, Any]:
    """Return the result; times in seconds, and fio's names where it has them."""
    return {
        **head("scaling", result.place, dataclasses.asdict(result.bench), result.missing),
        "points": [
            {
                "axis": point.axis,
                "bytes": point.nbytes,
                "tensors": point.tensors,
                "jobs": [job(line) for line in point.lines],
            }
            for point in result.points
        ],
    }


def scaling_cells(result: ScalingResult) -> Iterator[dict[str, Any]]:
    """Yield a row for a CSV file for each row of each point."""
    for point in result.points:
        for line in point.lines:
            yield {
                "axis": point.axis,
                "tensors": point.tensors,
                **line_as_cells("scaling", line),
            }


def scaling_plots(prefix: Path) -> dict[Axis, Path]:
    """Return the names of the plots, by curve."""
    return {axis: prefix.with_name(f"{prefix.name}-{axis}.png") for axis in _TITLES}


def plot_scaling(result: ScalingResult, prefix: Path) -> list[Path]:
    """Draw both curves, log over log, and return the files.

    Raises:
        BenchError: matplotlib is missing.
        OSError: a file cannot be written.
    """
    plots = scaling_plots(prefix)
    for axis, path in plots.items():
        points = [point for point in result.points if point.axis == axis]
        figure = new_figure(9, 5.5)
        axes = figure.subplots()
        _draw(axes, axis, points)
        axes.set_title(
            f"torch.save against {_title(result, axis)}: one run\n{wrapped(_caption(result))}",
            fontsize=8,
            loc="left",
        )
        save_figure(figure, path)
    return list(plots.values())


def _draw(axes: Any, axis: Axis, points: Sequence[Point]) -> None:
    places = [point.nbytes if axis == "size" else point.tensors for point in points]
    for number, marker in zip(range(len(points[0].lines)), _MARKERS, strict=False):
        middles, errors = with_errors([point.lines[number].bandwidth for point in points])
        axes.errorbar(
            places,
            middles,
            yerr=errors,
            marker=marker,
            markersize=5,
            elinewidth=0.8,
            capsize=2,
            label=_legend(points[0].lines[number].name),
        )
    axes.set_xscale("log", base=2 if axis == "size" else 10)
    axes.set_yscale("log")
    if axis == "size":
        axes.set_xticks(
            places, [format_bytes(place).partition(" ")[0] for place in places], rotation=30
        )
    else:
        axes.set_xticks(places, [f"{place:,}" for place in places])
    axes.minorticks_off()
    _label_few_decades(axes.yaxis)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(_X_LABELS[axis])
    axes.set_ylabel("GB/s (10⁹ bytes of tensor data per second)")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()


def _label_few_decades(axis: Any) -> None:
    """Label 2 and 5, too, where powers of ten alone would be too few."""
    from matplotlib.ticker import LogLocator

    low, high = axis.get_view_interval()
    if high < low * 10**_FEW_DECADES:
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))


def _legend(name: str) -> str:
    return f"{name} (with fsync)"


def _caption(result: ScalingResult) -> str:
    return (
        f"{result.place}\nmedians of {result.bench.runs} or "
        f"{result.bench.runs * 4} interleaved runs (least–greatest), file and directory synced"
    )


def _title(result: ScalingResult, axis: Axis) -> str:
    return _TITLES[axis].format(total=format_bytes(result.bench.total_bytes))


def _table(result: ScalingResult, axis: Axis) -> Table:
    points = [point for point in result.points if point.axis == axis]
    names = [line.name for line in points[0].lines]
    table = table_of(
        "bytes" if axis == "size" else "tensors",
        *(f"{name}, msec" for name in names),
        *(f"{name} × stock" for name in names[1:]),
        title=f"Against {_title(result, axis)}",
    )
    for point in points:
        table.add_row(
            f"{point.nbytes if axis == 'size' else point.tensors:,}",
            *(f"{line.seconds.median * 1e3:,.2f}" for line in point.lines),
            *(format_ratio(line.to_stock) for line in point.lines[1:]),
        )
    return table
