"""Profiles for people and for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fastserial.bench.measuring.machine import describe_folder
from fastserial.bench.presenting.save_view import format_ratio, table_of
from fastserial.bench.studies.profile import IDLE, OTHER, Phase, ProfileResult
from fastserial.reports import format_bandwidth, format_bytes

__all__ = ["profile_as_json", "show_profile"]

_WORDS = {
    OTHER: "other (Python in between)",
    IDLE: "idle (no block to fill or write)",
}


def show_profile(result: ProfileResult, console: Console) -> None:
    """Print the result of `bench profile`."""
    bench, report = result.bench, result.report
    speed = format_bandwidth(report.bytes / result.seconds)
    queued, written = (
        "/".join(f"{value * 1e3:.2f}" for value in (found.p50, found.p95, found.p99))
        for found in (report.submit, report.complete)
    )
    took = (
        f"{format_bytes(report.bytes)} in {result.seconds:.3f} s ({speed}), "
        f"{result.cpu_seconds:.3f} s of processor time"
    )
    settings = (
        f"engine={report.engine} block_size={format_bytes(report.block_size)} "
        f"queue_depth={report.queue_depth} threads={report.threads}"
    )
    lines = [
        str(result.machine),
        describe_folder(result.folder),
        f"fastserial: {settings}, durable, {'direct' if report.direct else 'page cache'}",
        f"{bench.container}, {bench.tensors} tensors on {bench.device}, {took}",
    ]
    if report.fallback:
        lines.append(f"fallback: {report.fallback}")
    for line in lines:
        console.print(escape(line), soft_wrap=True)
    console.print(_table("Saving thread: wall clock", result.caller))
    if result.workers:
        title = f"The engine's {result.worker_count} threads: thread time, all of them together"
        console.print(_table(title, result.workers))
        console.print(
            "Thread time is spent during the saving thread's “wait for blocks” and in "
            f"{result.worker_count} threads at once; it includes waiting for a processor.",
            soft_wrap=True,
        )
    lines = []
    if report.complete.count:
        lines.append(
            f"{report.complete.count} blocks: queued p50/p95/p99 {queued} ms, "
            f"written p50/p95/p99 {written} ms"
        )
    lines.append(
        f"The profiled saves took {format_ratio(result.slowdown)} × the time of the plain ones "
        f"interleaved with them; shown is the median of {bench.runs}."
    )
    lines.append(f"identical to stock torch's file: {'yes' if result.identical else 'NO'}")
    for line in lines:
        console.print(escape(line), soft_wrap=True)


def _table(title: str, phases: Sequence[Phase]) -> Table:
    table = table_of(title, "seconds", "share", "times")
    for phase in phases:
        name = _WORDS.get(phase.name, phase.name)
        count = "" if phase.name in _WORDS else f"{phase.count:,}"
        table.add_row(escape(name), f"{phase.seconds:.4f}", f"{phase.share:.1%}", count)
    table.add_section()
    total = sum(phase.seconds for phase in phases)
    table.add_row("together", f"{total:.4f}", f"{sum(phase.share for phase in phases):.1%}", "")
    return table


def profile_as_json(result: ProfileResult) -> dict[str, Any]:
    """Return the result without its trace; times in seconds."""
    found = dataclasses.asdict(dataclasses.replace(result, trace={}))
    del found["trace"]
    return {"benchmark": "profile", **found, "report": result.report.to_dict()}
