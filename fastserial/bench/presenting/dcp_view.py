"""The result of `fastserial bench dcp`, for people and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fastserial.bench.measuring.machine import describe_folder, this_machine
from fastserial.bench.measuring.summary import Spread
from fastserial.bench.measuring.units import MB
from fastserial.bench.presenting.export import stamp
from fastserial.bench.presenting.save_view import UNKNOWN, format_ratio, format_spread, table_of
from fastserial.bench.studies.dcp_plan import (
    MIXED,
    PLANNED,
    SHARDS,
    SMALL,
    STOCK,
    Balance,
    DcpBench,
    DcpResult,
    DcpRow,
    fio_name,
)
from fastserial.diagnosis.folder import probe_folder
from fastserial.reports import format_bytes

__all__ = ["results_as_json", "show_results"]

_HEADS = ("save, s", "MB/s", "× fio", "× DCP", "load, s", "× fio", "× DCP")
_SMALL_HEADS = ("save, ms", "of it to plan", "× DCP", "plan × DCP", "load, ms", "× DCP")


def show_results(bench: DcpBench, result: DcpResult, console: Console) -> None:
    """Print where it ran, and a table for each state and count of ranks."""
    what = (
        f"medians of {bench.runs} interleaved runs (least–greatest), times of the slowest rank; "
        "saves are durable, into an empty folder; loads begin with nothing in the page cache"
    )
    place = describe_folder(probe_folder(Path(bench.folder)))
    for line in (str(this_machine()), place, what):
        console.print(escape(line), soft_wrap=True)
    for case, ranks in dict.fromkeys((row.case, row.ranks) for row in result.rows):
        some = [row for row in result.rows if (row.case, row.ranks) == (case, ranks)]
        title = f"{ranks} rank{'s' * (ranks > 1)}: {_described(bench, case)}"
        console.print(_mixed(title, some) if case == MIXED else _small(title, some))
    console.print(_balance(result.balance))


def _described(bench: DcpBench, case: str) -> str:
    return {
        MIXED: f"{bench.tensors} tensors, {format_bytes(bench.nbytes)}, in rows",
        SMALL: f"{bench.small} tensors of 32 B, the same on all ranks",
        SHARDS: f"{bench.small} tensors in rows, 32 B of each on a rank",
        PLANNED: f"{bench.planned} tensors in rows, 256 B of each on a rank",
    }[case]


def _mixed(title: str, rows: Sequence[DcpRow]) -> Table:
    table = table_of("", *_HEADS, "extra memory", "loaded", title=title)
    by_name = {row.name: row for row in rows}
    stock, fio = by_name.get(STOCK), by_name.get(fio_name(rows[0].ranks))
    for row in rows:
        if row.problem is not None:
            table.add_row(row.name, f"[red]{escape(row.problem)}[/red]")
            continue
        save, load = Spread.of(row.saves), Spread.of(row.loads)
        scale = row.nbytes / fio.nbytes if fio is not None and fio.nbytes else 1.0
        table.add_row(
            escape(row.name),
            format_spread(save, digits=2),
            f"{row.nbytes / save.median / MB:,.0f}",
            format_ratio(_ratio(row, fio, "saves", scale)),
            format_ratio(_ratio(row, stock, "saves")),
            format_spread(load, digits=2),
            format_ratio(_ratio(row, fio, "loads", scale)),
            format_ratio(_ratio(row, stock, "loads")),
            UNKNOWN if row is fio else f"{_mib(row.save_extra)} / {_mib(row.load_extra)}",
            _loaded(row),
        )
    return table


def _small(title: str, rows: Sequence[DcpRow]) -> Table:
    table = table_of("", *_SMALL_HEADS, "on disk", "loaded", title=title)
    stock = next((row for row in rows if row.name == STOCK), None)
    for row in rows:
        if row.problem is not None:
            table.add_row(row.name, f"[red]{escape(row.problem)}[/red]")
            continue
        table.add_row(
            escape(row.name),
            format_spread(Spread.of(row.saves), 1e-3),
            format_spread(Spread.of(row.plans), 1e-3, 1),
            format_ratio(_ratio(row, stock, "saves")),
            format_ratio(_ratio(row, stock, "plans")),
            format_spread(Spread.of(row.loads), 1e-3),
            format_ratio(_ratio(row, stock, "loads")),
            format_bytes(row.nbytes),
            _loaded(row),
        )
    return table


def _balance(found: Sequence[Balance]) -> Table:
    title = f"MiB that each of {len(found[0].ours)} ranks writes of what all of them have"
    heads = ("DCP", "most ÷ mean", "fastserial", "most ÷ mean")
    table = table_of("", *heads, title=title)
    for one in found:
        cells: list[str] = []
        for loads in (one.stock, one.ours):
            cells.append(" / ".join(f"{nbytes / 2**20:.0f}" for nbytes in loads))
            cells.append(f"{max(loads) * len(loads) / sum(loads):.3f}")
        table.add_row(one.shape, *cells)
    return table


def _loaded(row: DcpRow) -> str:
    return {None: UNKNOWN, True: "equal", False: "[red]WRONG[/red]"}[row.equal]


def _mib(nbytes: int | None) -> str:
    return UNKNOWN if nbytes is None else f"{nbytes / 2**20:.0f}MiB"


def _ratio(row: DcpRow, base: DcpRow | None, what: str, scale: float = 1.0) -> Spread | None:
    """Return the time of another row over that of this one, round by round.

    Args:
        what: which times: `saves`, `plans`, `loads`.
        scale: how many times as many bytes this row moves.
    """
    if base is None or base.problem is not None or row is base:
        return None
    pairs = zip(getattr(row, what), getattr(base, what), strict=True)
    return Spread.of(theirs / mine * scale for mine, theirs in pairs)


def results_as_json(bench: DcpBench, result: DcpResult) -> dict[str, Any]:
    """Return the result as plain JSON values; times in seconds."""
    return {
        "benchmark": "dcp",
        **stamp(),
        "machine": dataclasses.asdict(this_machine()),
        "folder": dataclasses.asdict(probe_folder(Path(bench.folder))),
        "bench": dataclasses.asdict(bench),
        "rows": [dataclasses.asdict(row) for row in result.rows],
        "balance": [dataclasses.asdict(one) for one in result.balance],
    }
