"""The result of `fastserial bench onefile`, for people and as JSON."""

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
from fastserial.bench.presenting.save_view import UNKNOWN, format_ratio, format_spread, table_of
from fastserial.bench.studies.onefile_plan import GATHER, OneFileBench, RowResult
from fastserial.diagnosis.folder import probe_folder
from fastserial.reports import format_bytes

__all__ = ["results_as_json", "show_results"]

_PHASES = ("plan", "wait", "exchange", "write", "sync")


def show_results(bench: OneFileBench, results: Sequence[RowResult], console: Console) -> None:
    """Print where it ran, a row for each way to write, and what each rank did."""
    what = (
        f"{bench.tensors} tensors, {format_bytes(bench.nbytes)}, in rows on {bench.ranks} ranks of "
        f"one machine; medians of {bench.runs} interleaved runs (least–greatest), all durable; "
        "each into an empty folder, with no page dirty"
    )
    place = describe_folder(probe_folder(Path(bench.folder)))
    for line in (str(this_machine()), place, what):
        console.print(escape(line), soft_wrap=True)
    by_name = {result.name: result for result in results}
    table = table_of("", "seconds", "MB/s", "× fio", "× gather", "extra memory", "identical")
    for result in results:
        if result.problem is not None or not result.seconds:
            table.add_row(result.name, f"[red]{escape(str(result.problem))}[/red]")
            continue
        took = Spread.of(result.seconds)
        extra = result.extra_bytes
        table.add_row(
            result.name,
            format_spread(took, digits=2),
            f"{result.nbytes / took.median / MB:,.0f}",
            format_ratio(_ratio(result, by_name.get(result.yardstick or ""))),
            format_ratio(_ratio(result, by_name.get(GATHER))),
            UNKNOWN if extra is None or "fio" in result.name else f"{extra / 2**20:.0f}MiB",
            {None: UNKNOWN, True: "yes", False: "[red]NO[/red]"}[result.identical],
        )
    console.print(table)
    shown = [result for result in results if result.parts]
    if shown:
        console.print(_ranks(shown[-1]))


def _ranks(result: RowResult) -> Any:
    """Return a table of what each rank did in the run of median time."""
    order = sorted(range(len(result.seconds)), key=result.seconds.__getitem__)
    title = f"{result.name}: the ranks, seconds of each phase"
    table = table_of("", "wrote", "sent", "received", *_PHASES, title=title)
    for part in result.parts[order[len(order) // 2]]:
        moved = (part["bytes"], part["sent_bytes"], part["received_bytes"])
        phases = [f"{part['phases'].get(name, 0):.3f}" for name in _PHASES]
        table.add_row(f"rank {part['rank']}", *map(format_bytes, moved), *phases)
    return table


def results_as_json(bench: OneFileBench, results: Sequence[RowResult]) -> dict[str, Any]:
    """Return the result as plain JSON values; times in seconds."""
    return {
        "benchmark": "onefile",
        **stamp(),
        "machine": dataclasses.asdict(this_machine()),
        "folder": dataclasses.asdict(probe_folder(Path(bench.folder))),
        "bench": dataclasses.asdict(bench),
        "rows": [dataclasses.asdict(result) for result in results],
    }


def _ratio(result: RowResult, base: RowResult | None) -> Spread | None:
    """Return the bandwidth over that of another row, round by round."""
    if base is None or base.problem is not None or not base.nbytes or result is base:
        return None
    scale = result.nbytes / base.nbytes
    pairs = zip(result.seconds, base.seconds, strict=True)
    return Spread.of(theirs / mine * scale for mine, theirs in pairs)
