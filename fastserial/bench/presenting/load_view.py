"""The result of `fastserial bench load`, for people and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fastserial.bench.measuring.machine import describe_folder, describe_options
from fastserial.bench.measuring.summary import Line
from fastserial.bench.measuring.units import MB
from fastserial.bench.presenting.export import job, stamp
from fastserial.bench.presenting.save_view import (
    UNKNOWN,
    format_ratio,
    print_lines,
    show_lines,
    show_missing,
)
from fastserial.bench.studies.load import TEMPERATURES, LoadLine, LoadResult
from fastserial.reports import format_bytes

__all__ = ["load_as_json", "load_caption", "load_lines", "show_load"]


def show_load(result: LoadResult, console: Console, lines: bool = False) -> None:
    """Print the result of `bench load`, with `lines` also one line per row in fio's manner."""
    print_lines(load_caption(result), console)
    console.print(escape(describe_options(result.options)), soft_wrap=True)
    show_missing(result.missing, console)
    console.print(_table("", result.lines))
    if result.small:
        console.print(_table("20,000 tensors of 4 KiB", result.small))
    if lines:
        show_lines(load_lines(result), console, "READ")


def load_caption(result: LoadResult) -> str:
    """Return where and what was measured, and how, in three lines."""
    bench = result.bench
    return (
        f"{result.machine}\n{describe_folder(result.folder)}\n{bench.tensors} tensors, "
        f"{format_bytes(bench.nbytes)}; medians of {bench.runs} interleaved runs "
        "(least–greatest); ratios are of runs of the same round; memory is the peak beyond the data"
    )


def load_lines(result: LoadResult) -> list[Line]:
    """Return the rows as those of other benchmarks, the temperature in their names."""
    return [_line(line) for line in result.lines]


def _table(title: str, lines: Sequence[LoadLine]) -> Table:
    table = Table(title, "MB/s", "× fio", "× stock", "CPU s/GB", "memory", "equal")
    for column in table.columns[1:]:
        column.justify = "right"
    for temperature in TEMPERATURES:
        table.add_section()
        table.add_row(f"[bold]{temperature}[/bold]")
        for line in lines:
            if line.temperature == temperature:
                table.add_row(*_cells(line))
    return table


def _cells(line: LoadLine) -> Iterator[str]:
    spread = line.bandwidth
    yield f"  {line.name}"
    yield f"{spread.median / MB:,.0f} ({spread.low / MB:,.0f}–{spread.high / MB:,.0f})"
    yield format_ratio(line.to_fio)
    yield format_ratio(line.to_stock)
    yield f"{line.cpu_per_gb.median:.2f}"
    yield UNKNOWN if line.over_bytes is None else f"{line.over_bytes / 2**20:+.0f}MiB"
    yield {None: UNKNOWN, True: "yes", False: "[red]NO[/red]"}[line.equal]


def load_as_json(result: LoadResult) -> dict[str, Any]:
    """Return the result as plain JSON values; fio's names where it has them, times in seconds."""
    return {
        "benchmark": "load",
        **stamp(),
        "machine": dataclasses.asdict(result.machine),
        "folder": dataclasses.asdict(result.folder),
        "global options": {**dataclasses.asdict(result.bench), **result.options},
        "missing": result.missing,
        "jobs": [_job(line) for line in result.lines],
        "small": [_job(line) for line in result.small],
    }


def _job(line: LoadLine) -> dict[str, Any]:
    found = job(_line(line), "read")
    del found["peak_extra_bytes"], found["identical"]
    return {**found, "jobname": line.name, "peak_beyond_data_bytes": line.over_bytes}


def _line(line: LoadLine) -> Line:
    samples = line.samples
    middle = sorted(samples, key=lambda sample: sample.seconds)[len(samples) // 2]
    return Line(
        name=f"{line.name}, {line.temperature}",
        group=line.temperature,
        nbytes=samples[-1].nbytes,
        samples=samples,
        seconds=line.seconds,
        bandwidth=line.bandwidth,
        to_fio=line.to_fio,
        to_stock=line.to_stock,
        cpu_per_gb=line.cpu_per_gb,
        extra_bytes=line.over_bytes,
        identical=None,
        latency=middle.latency,
        fallback=line.fallback,
        equal=line.equal,
    )
