"""The result of `fastserial bench deepspeed`, for people and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from fastserial.bench.measuring.machine import describe_folder, this_machine
from fastserial.bench.measuring.summary import Spread
from fastserial.bench.measuring.units import MB
from fastserial.bench.presenting.export import stamp
from fastserial.bench.presenting.save_view import UNKNOWN, format_ratio, table_of
from fastserial.bench.studies.deepspeed_plan import DeepSpeedBench, RowResult
from fastserial.diagnosis.folder import probe_folder
from fastserial.reports import format_bytes

__all__ = ["results_as_json", "show_results"]


def show_results(bench: DeepSpeedBench, results: Sequence[RowResult], console: Console) -> None:
    """Print where it ran, and a row for each checkpoint engine; the first is stock DeepSpeed."""
    place = describe_folder(probe_folder(Path(bench.folder)))
    what = (
        f"{bench.model}, ZeRO {bench.zero_stage}, {bench.world_size} processes, "
        f"{'legacy' if bench.legacy else 'zip'}; medians of {bench.runs} interleaved runs "
        "(least–greatest), all durable; ratios are of runs of the same round"
    )
    for line in (str(this_machine()), place, what):
        console.print(escape(line), soft_wrap=True)
    table = table_of("", "files", "size", "seconds", "MB/s", "× stock", "identical")
    for result in results:
        if result.problem is not None or not result.seconds:
            table.add_row(result.name, f"[red]{escape(str(result.problem))}[/red]")
            continue
        took = Spread.of(result.seconds)
        table.add_row(
            result.name,
            str(result.files),
            format_bytes(result.nbytes),
            format_ratio(took),
            f"{result.nbytes / took.median / MB:,.0f}",
            format_ratio(_ratio(result, results[0])),
            {None: UNKNOWN, True: "yes", False: "[red]NO[/red]"}[result.identical],
        )
    console.print(table)


def results_as_json(bench: DeepSpeedBench, results: Sequence[RowResult]) -> dict[str, Any]:
    """Return the result as plain JSON values; times in seconds."""
    return {
        "benchmark": "deepspeed",
        **stamp(),
        "machine": dataclasses.asdict(this_machine()),
        "folder": dataclasses.asdict(probe_folder(Path(bench.folder))),
        "bench": dataclasses.asdict(bench),
        "rows": [dataclasses.asdict(result) for result in results],
    }


def _ratio(result: RowResult, stock: RowResult) -> Spread | None:
    """Return the speed over that of stock DeepSpeed, round by round."""
    if stock.problem is not None:
        return None
    pairs = zip(result.seconds, stock.seconds, strict=True)
    return Spread.of(theirs / mine for mine, theirs in pairs)
