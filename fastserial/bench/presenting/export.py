"""Results as JSON and CSV: fio's shape where fio has the same thing, so its tools can read it."""

from __future__ import annotations

import csv
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastserial.bench.measuring.machine import Place
from fastserial.bench.measuring.summary import Line, Spread
from fastserial.bench.studies.comparison import Comparison
from fastserial.bench.studies.save import SaveResult
from fastserial.reports import Latency

__all__ = [
    "comparison_as_json",
    "head",
    "job",
    "line_as_cells",
    "save_as_json",
    "stamp",
    "write_csv",
    "write_json",
]


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON to a file.

    Raises:
        OSError: the file cannot be written.
    """
    path.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the same keys to a file, the keys as its first line; None is empty.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]) if rows else [])
        table.writeheader()
        table.writerows(rows)


def stamp() -> dict[str, Any]:
    """Return the present time, under the names in fio's JSON."""
    now = time.time()
    return {"timestamp": int(now), "timestamp_ms": int(now * 1000), "time": time.ctime(now)}


def head(
    benchmark: str, place: Place, settings: Mapping[str, Any], missing: Mapping[str, str]
) -> dict[str, Any]:
    """Return what all results begin with: what, when, where, how, and which rows are missing."""
    return {
        "benchmark": benchmark,
        **stamp(),
        "machine": dataclasses.asdict(place.machine),
        "folder": dataclasses.asdict(place.folder),
        "global options": {**settings, **place.options},
        "missing": missing,
    }


def comparison_as_json(
    benchmark: str, found: Comparison, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a comparison; times in seconds unless the name says otherwise."""
    return {
        **head(benchmark, found.place, settings, found.missing),
        "data": found.data,
        "fio on small pages": found.fio_small_pages,
        "jobs": [job(line) for line in found.lines],
    }


def save_as_json(result: SaveResult) -> dict[str, Any]:
    """Return the result of `bench save`; times in seconds unless the name says otherwise."""
    return {
        **comparison_as_json("save", result.comparison, dataclasses.asdict(result.bench)),
        "small": [
            {"case": case.name, "jobs": [job(line) for line in case.lines]} for case in result.small
        ],
        "startup": result.startup and dataclasses.asdict(result.startup),
    }


def job(line: Line, direction: str = "write") -> dict[str, Any]:
    """Return a row as one of fio's jobs; `direction` is `write` or `read`."""
    return {
        "jobname": line.name,
        "group": line.group,
        direction: {
            "io_bytes": line.nbytes,
            "io_kbytes": line.nbytes // 1024,
            "bw_bytes": round(line.bandwidth.median),
            "bw": round(line.bandwidth.median / 1024),
            "bw_min": round(line.bandwidth.low / 1024),
            "bw_max": round(line.bandwidth.high / 1024),
            "runtime": round(line.seconds.median * 1000),
            **_latency(line.latency, line.seconds.median),
        },
        "seconds": dataclasses.asdict(line.seconds),
        "ratio_to_fio": line.to_fio and dataclasses.asdict(line.to_fio),
        "ratio_to_stock": line.to_stock and dataclasses.asdict(line.to_stock),
        "cpu_seconds_per_gb": dataclasses.asdict(line.cpu_per_gb),
        "peak_extra_bytes": line.extra_bytes,
        "identical": line.identical,
        "equal": line.equal,
        "fallback": line.fallback,
        "runs": [dataclasses.asdict(sample) for sample in line.samples],
    }


def line_as_cells(benchmark: str, line: Line) -> dict[str, Any]:
    """Return a row for a CSV file: bytes, seconds, bytes per second, and ratios."""
    found = line.latency if line.latency is not None and line.latency.count else None
    return {
        "benchmark": benchmark,
        "group": line.group,
        "name": line.name,
        "runs": len(line.samples),
        "bytes": line.nbytes,
        **_spread("seconds", line.seconds),
        **_spread("bytes_per_second", line.bandwidth),
        **_spread("ratio_to_fio", line.to_fio),
        **_spread("ratio_to_stock", line.to_stock),
        **_spread("cpu_seconds_per_gb", line.cpu_per_gb),
        "peak_extra_bytes": line.extra_bytes,
        "latency_p50_seconds": found and found.p50,
        "latency_p95_seconds": found and found.p95,
        "latency_p99_seconds": found and found.p99,
        "identical": line.identical,
        "equal": line.equal,
        "fallback": line.fallback,
    }


def _spread(name: str, spread: Spread | None) -> dict[str, float | None]:
    values = (None,) * 3 if spread is None else (spread.median, spread.low, spread.high)
    return dict(zip((name, f"{name}_least", f"{name}_greatest"), values, strict=True))


def _latency(found: Latency | None, seconds: float) -> dict[str, Any]:
    """Return what is known of the single requests; nothing for rows that do not tell."""
    if found is None or not found.count:
        return {}
    points = {50: found.p50, 95: found.p95, 99: found.p99}
    return {
        "total_ios": found.count,
        "iops": found.count / seconds if seconds > 0 else 0.0,
        "clat_ns": {
            "mean": found.mean * 1e9,
            "max": round(found.max * 1e9),
            "N": found.count,
            "percentile": {f"{p}.000000": round(value * 1e9) for p, value in points.items()},
        },
    }
