"""The result of `fastserial bench plan`: a table, and JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console

from fastserial.bench.presenting.export import stamp
from fastserial.bench.presenting.save_view import table_of
from fastserial.bench.studies.planning import PlanResult
from fastserial.reports import format_bytes

__all__ = ["planning_as_json", "show_planning"]

_COLUMNS = (
    "rank",
    "CPU s",
    "tensors",
    "plan/tensor",
    "writes",
    "ranges",
    "sends",
    "to",
    "receives",
    "of",
)


def show_planning(result: PlanResult, console: Console) -> None:
    """Print what was planned, and a line for each rank that was looked at."""
    bench = result.bench
    console.print(
        f"{result.tensors} tensors, a file of {format_bytes(result.nbytes)}, {bench.ranks} ranks: "
        f"{bench.stages} stages of {bench.shards} (FSDP) x {bench.tensor_parallel} (tensor "
        f"parallel); {bench.writers or bench.ranks} write. Computed, no byte was moved.",
        soft_wrap=True,
    )
    table = table_of(*_COLUMNS)
    for plan in result.plans:
        table.add_row(
            str(plan.rank),
            f"{plan.seconds:.2f}",
            str(plan.tensors),
            f"{plan.plan_bytes / max(1, plan.tensors):.0f} B",
            format_bytes(plan.written),
            str(plan.ranges),
            format_bytes(plan.sent),
            f"{plan.to} ranks",
            format_bytes(plan.received),
            f"{plan.of} ranks",
        )
    console.print(table)


def planning_as_json(result: PlanResult) -> dict[str, Any]:
    """Return the result; times in seconds."""
    return {
        **stamp(),
        "benchmark": "plan",
        "settings": dataclasses.asdict(result.bench),
        "tensors": result.tensors,
        "bytes": result.nbytes,
        "ranks": [dataclasses.asdict(plan) for plan in result.plans],
    }
