"""The result of `fastserial bench load`, for people and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fastserial.bench.load import TEMPERATURES, LoadLine, LoadResult
from fastserial.bench.machine import describe_folder
from fastserial.bench.summary import Spread
from fastserial.bench.units import MB
from fastserial.report import format_bytes

__all__ = ["load_as_json", "show_load"]

_UNKNOWN = "–"


def show_load(result: LoadResult, console: Console) -> None:
    """Print the result of `bench load`."""
    bench = result.bench
    console.print(escape(str(result.machine)), soft_wrap=True)
    console.print(escape(describe_folder(result.folder)), soft_wrap=True)
    console.print(
        f"{bench.tensors} tensors, {format_bytes(bench.nbytes)}; medians of {bench.runs} "
        "interleaved runs (least–greatest); ratios are of runs of the same round; memory is the "
        "peak beyond the data",
        soft_wrap=True,
    )
    console.print(_table("", result.lines))
    if result.small:
        console.print(_table("20,000 tensors of 4 KiB", result.small))
    for name, why in result.missing.items():
        console.print(f"without {escape(name)}: {escape(why)}", soft_wrap=True)


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
    yield _ratio(line.to_fio)
    yield _ratio(line.to_stock)
    yield f"{line.cpu_per_gb.median:.2f}"
    yield _UNKNOWN if line.over_bytes is None else f"{line.over_bytes / 2**20:+.0f}MiB"
    yield {None: _UNKNOWN, True: "yes", False: "[red]NO[/red]"}[line.equal]


def _ratio(spread: Spread | None) -> str:
    if spread is None:
        return _UNKNOWN
    return f"{spread.median:.2f} ({spread.low:.2f}–{spread.high:.2f})"


def load_as_json(result: LoadResult) -> dict[str, Any]:
    """Return the result as plain JSON values; fio's names where it has them, times in seconds."""
    return {
        "benchmark": "load",
        "machine": dataclasses.asdict(result.machine),
        "folder": dataclasses.asdict(result.folder),
        "global options": dataclasses.asdict(result.bench),
        "missing": result.missing,
        "jobs": [_job(line) for line in result.lines],
        "small": [_job(line) for line in result.small],
    }


def _job(line: LoadLine) -> dict[str, Any]:
    return {
        "jobname": line.name,
        "group": line.temperature,
        "read": {
            "io_bytes": line.samples[-1].nbytes,
            "bw_bytes": round(line.bandwidth.median),
            "bw": round(line.bandwidth.median / 1024),
            "runtime": round(line.seconds.median * 1000),
        },
        "ratio_to_fio": line.to_fio and dataclasses.asdict(line.to_fio),
        "ratio_to_stock": line.to_stock and dataclasses.asdict(line.to_stock),
        "cpu_seconds_per_gb": dataclasses.asdict(line.cpu_per_gb),
        "peak_beyond_data_bytes": line.over_bytes,
        "equal": line.equal,
        "fallback": line.fallback,
        "runs": [dataclasses.asdict(sample) for sample in line.samples],
    }
