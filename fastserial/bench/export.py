"""Results as JSON: fio's shape where fio has the same thing, so that its tools can read it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastserial.bench.save import SaveResult
from fastserial.bench.summary import Line
from fastserial.report import Latency

__all__ = ["save_as_json", "write_json"]


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON to a file.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


def save_as_json(result: SaveResult) -> dict[str, Any]:
    """Return the result of `bench save`; times in seconds unless the name says otherwise."""
    return {
        "benchmark": "save",
        "machine": dataclasses.asdict(result.machine),
        "folder": dataclasses.asdict(result.folder),
        "global options": {**dataclasses.asdict(result.bench), **result.options},
        "fio missing": result.fio_missing,
        "fio on small pages": result.fio_small_pages,
        "jobs": _jobs(result.lines),
        "small": [{"case": case.name, "jobs": _jobs(case.lines)} for case in result.small],
        "startup": result.startup and dataclasses.asdict(result.startup),
    }


def _jobs(lines: Sequence[Line]) -> list[dict[str, Any]]:
    return [
        {
            "jobname": line.name,
            "group": line.group,
            "write": {
                "io_bytes": line.nbytes,
                "bw_bytes": round(line.bandwidth.median),
                "bw": round(line.bandwidth.median / 1024),
                "bw_min": round(line.bandwidth.low / 1024),
                "bw_max": round(line.bandwidth.high / 1024),
                "runtime": round(line.seconds.median * 1000),
                **_latency(line.latency),
            },
            "seconds": dataclasses.asdict(line.seconds),
            "ratio_to_fio": line.to_fio and dataclasses.asdict(line.to_fio),
            "ratio_to_stock": line.to_stock and dataclasses.asdict(line.to_stock),
            "cpu_seconds_per_gb": dataclasses.asdict(line.cpu_per_gb),
            "peak_extra_bytes": line.extra_bytes,
            "identical": line.identical,
            "runs": [dataclasses.asdict(sample) for sample in line.samples],
        }
        for line in lines
    ]


def _latency(found: Latency | None) -> dict[str, Any]:
    if found is None or not found.count:
        return {}
    points = {50: found.p50, 95: found.p95, 99: found.p99}
    return {
        "total_ios": found.count,
        "clat_ns": {
            "mean": found.mean * 1e9,
            "max": round(found.max * 1e9),
            "N": found.count,
            "percentile": {f"{p}.000000": round(value * 1e9) for p, value in points.items()},
        },
    }
