"""The result of `fastserial bench gil`: a table, and JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console
from rich.markup import escape

from fastserial.bench.presenting.export import head
from fastserial.bench.presenting.save_view import format_spread, show_head, table_of
from fastserial.bench.studies.gil import GilResult
from fastserial.reports import format_bytes

__all__ = ["gil_as_json", "show_gil"]


def show_gil(result: GilResult, console: Console) -> None:
    """Print where it ran, and the table."""
    bench = result.bench
    caption = (
        f"{result.place}\n{bench.tensors} tensors, {format_bytes(bench.nbytes)}; medians of "
        f"{bench.runs} interleaved runs (least–greatest)"
    )
    show_head(caption, result.place, {}, console)
    longest = "longest pause of a spinning thread, ms"
    table = table_of("", "save, s", longest, "though it had a CPU, ms", "pauses, %")
    for line in result.lines:
        table.add_row(
            escape(line.name),
            format_spread(line.seconds, digits=2),
            format_spread(line.longest, 1e-3, 1),
            format_spread(line.held, 1e-3, 1) if line.held is not None else "?",
            format_spread(line.share, 1e-2, 1),
        )
    console.print(table)


def gil_as_json(result: GilResult) -> dict[str, Any]:
    """Return the result; times in seconds."""
    return {
        **head("gil", result.place, dataclasses.asdict(result.bench), {}),
        "ways": [dataclasses.asdict(line) for line in result.lines],
    }
