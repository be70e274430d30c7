"""The result of `fastserial bench load`, for people and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from fastserial.bench.measuring.summary import Line
from fastserial.bench.presenting.export import head, job
from fastserial.bench.presenting.save_view import (
    UNKNOWN,
    grouped_table,
    show_head,
    show_lines,
)
from fastserial.bench.studies.load import LoadResult
from fastserial.reports import format_bytes

__all__ = ["load_as_json", "load_caption", "load_lines", "show_load"]


def show_load(result: LoadResult, console: Console, lines: bool = False) -> None:
    """Print the result of `bench load`, with `lines` also one line per row in fio's format."""
    show_head(load_caption(result), result.place, result.missing, console)
    console.print(_table("", result.lines))
    if result.small:
        console.print(_table("20,000 tensors of 4 KiB", result.small))
    if lines:
        show_lines(load_lines(result), console, "READ")


def load_caption(result: LoadResult) -> str:
    """Return where and what was measured, and how, in three lines."""
    bench = result.bench
    target = ", to the GPU" if bench.gpu else ""
    return (
        f"{result.place}\n{bench.tensors} tensors, "
        f"{format_bytes(bench.nbytes)}{target}; medians of {bench.runs} interleaved runs "
        "(least–greatest); ratios are of runs of the same round; memory is the peak beyond the data"
    )


def load_lines(result: LoadResult) -> list[Line]:
    """Return the rows as those of other benchmarks, the temperature in their names."""
    return [replace(line, name=f"{line.name}, {line.group}") for line in result.lines]


def _table(title: str, lines: Sequence[Line]) -> Table:
    words = {None: UNKNOWN, True: "yes", False: "[red]NO[/red]"}
    return grouped_table(title, lines, "memory", "equal", lambda line: words[line.equal])


def load_as_json(result: LoadResult) -> dict[str, Any]:
    """Return the result as plain JSON values; fio's names where it has them, times in seconds."""
    return {
        **head("load", result.place, dataclasses.asdict(result.bench), result.missing),
        "jobs": [_job(line) for line in result.lines],
        "small": [_job(line) for line in result.small],
    }


def _job(line: Line) -> dict[str, Any]:
    found = job(line, "read")
    del found["identical"]
    found["peak_beyond_data_bytes"] = found.pop("peak_extra_bytes")
    return found
