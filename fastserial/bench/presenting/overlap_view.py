"""The result of `fastserial bench overlap`: table, JSON, and a plot of the steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from fastserial.bench.measuring.summary import Spread
from fastserial.bench.presenting.export import head
from fastserial.bench.presenting.plot import new_figure, save_figure, wrapped
from fastserial.bench.presenting.save_view import UNKNOWN, format_spread, show_head, table_of
from fastserial.bench.studies.overlap import OverlapLine, OverlapResult
from fastserial.reports import format_bytes

__all__ = ["overlap_as_json", "plot_overlap", "show_overlap"]


def show_overlap(result: OverlapResult, console: Console) -> None:
    """Print where it ran, the table, and what to read from it."""
    show_head(_caption(result), result.place, result.missing, console)
    table = table_of(
        "", "lost s a checkpoint", "of a step", "call, s", "longest step, s", "checked"
    )
    for line in (result.alone, *result.lines):
        lost = result.lost(line)
        table.add_row(
            escape(line.name),
            format_spread(lost, digits=2),
            f"{lost.median / result.step:.0%}",
            format_spread(Spread.of(line.stalls), digits=2) if line.stalls else "",
            f"{max(line.steps):.2f}",
            UNKNOWN if line.right is None else "equal" if line.right else "[red]WRONG[/red]",
        )
    console.print(table)


def overlap_as_json(result: OverlapResult) -> dict[str, Any]:
    """Return the result; times in seconds."""
    bench = dataclasses.asdict(result.bench)
    return {
        **head("overlap", result.place, bench, result.missing),
        "bytes": result.nbytes,
        "step": result.step,
        "alone": _row(result, result.alone),
        "ways": [_row(result, line) for line in result.lines],
    }


def _row(result: OverlapResult, line: OverlapLine) -> dict[str, Any]:
    return {**dataclasses.asdict(line), "lost": dataclasses.asdict(result.lost(line))}


def plot_overlap(result: OverlapResult, path: Path) -> None:
    """Draw the times of the steps of the last round, for each way.

    Raises:
        BenchError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    figure = new_figure(10, 5.5)
    axes = figure.subplots()
    for line in (result.alone, *result.lines):
        _draw(axes, line)
    every = result.bench.every
    for save in range(1, result.bench.saves + 1):
        axes.axvline(save * every + 0.5, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel("step; dotted: a checkpoint")
    axes.set_ylabel("seconds of the step, and of the call that saves after it")
    axes.set_title(f"fastserial bench overlap\n{wrapped(_caption(result))}", fontsize=8, loc="left")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    save_figure(figure, path)


def _draw(axes: Any, line: OverlapLine) -> None:
    axes.plot(range(1, len(line.steps) + 1), line.steps, marker=".", label=line.name)


def _caption(result: OverlapResult) -> str:
    bench = result.bench
    threads = f" on {bench.threads} threads" if bench.threads is not None else ""
    return (
        f"{result.place}\n{bench.model} model on {bench.device}, {bench.batch} × {bench.tokens} "
        f"tokens a step, {result.step:.2f} s{threads}; a checkpoint of "
        f"{format_bytes(result.nbytes)} each {bench.every} steps; medians of "
        f"{bench.runs} interleaved runs (least–greatest)"
    )
