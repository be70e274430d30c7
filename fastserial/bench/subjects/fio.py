"""fio, the yardstick: what the device gives to a program that does nothing else."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.measure import Sample
from fastserial.bench.measuring.rows import DURABLE, Row
from fastserial.reports import Latency

__all__ = [
    "BLOCKS",
    "DEPTH",
    "ENGINES",
    "HUGE_BYTES",
    "FioVariant",
    "best_variants",
    "fio_row",
    "fresh_variant",
    "installed",
    "latency_of",
    "run_fio",
    "run_job",
]

ENGINES = ("io_uring", "libaio")
BLOCKS = (1 << 20, 4 << 20, 8 << 20)
DEPTH = 8
HUGE_BYTES = (DEPTH + 2) * BLOCKS[-1]  # of reserved huge pages, for its buffers
_ERROR_LINES = 3


@dataclass(frozen=True, slots=True)
class FioVariant:
    """One way to run fio: engine, block size (bytes), preallocation, direct I/O, depth.

    `huge`: its buffers are reserved huge pages. `fresh`: each block of the file has a buffer of its
    own (all are queued at once), so that no memory is written twice, as in saving a checkpoint.
    """

    engine: str
    block: int
    preallocate: bool
    direct: bool = True
    depth: int = DEPTH
    huge: bool = False
    fresh: bool = False

    def __str__(self) -> str:
        extras = ", prealloc" if self.preallocate else ""
        extras += ("" if self.direct else ", buffered") + (", huge pages" if self.huge else "")
        depth = ", fresh data" if self.fresh else f"×{self.depth}"
        return f"fio {self.engine} {self.block >> 20}MiB{depth}{extras}"


def installed() -> bool:
    """Tell whether fio can be run."""
    return shutil.which("fio") is not None


def run_fio(variant: FioVariant, path: Path, nbytes: int) -> Sample:
    """Write a new file of about `nbytes` bytes with fio, its final fsync included.

    The preallocation is not in fio's time, nor is its start.

    Raises:
        BenchError: fio failed, with its own words.
    """
    blocks = max(1, round(nbytes / variant.block))
    options = [
        "--rw=write",
        f"--size={blocks * variant.block}",
        f"--bs={variant.block}",
        f"--ioengine={variant.engine}",
        f"--iodepth={blocks if variant.fresh else variant.depth}",
        f"--direct={int(variant.direct)}",
        f"--fallocate={'native' if variant.preallocate else 'none'}",
        "--end_fsync=1",
    ]
    return run_job(options, path, "write", variant.huge, str(variant))


def run_job(
    options: Sequence[str], path: Path, direction: Literal["read", "write"], huge: bool, what: str
) -> Sample:
    """Run fio once on a file and return what it tells of one direction.

    Args:
        options: of fio, beside those that are always the same.
        huge: its buffers are reserved huge pages.
        what: begins the message of the error.

    Raises:
        BenchError: fio failed, with its own words.
    """
    command = [
        "fio",
        "--name=fastserial-bench",
        # fio takes a colon for the end of a file name
        f"--filename={str(path).replace(':', chr(92) + ':')}",
        *options,
        f"--iomem={'mmaphuge' if huge else 'malloc'}",
        "--thread",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    except (ValueError, LookupError):
        job = None
    if done.returncode or job is None or job["error"] or not job[direction]["runtime"]:
        words = (done.stderr or done.stdout).strip().splitlines()[:_ERROR_LINES]
        raise BenchError(f"{what} failed: {' '.join(words)}")
    moved = job[direction]
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    latency = latency_of(moved["clat_ns"])
    return Sample(moved["io_bytes"], moved["runtime"] / 1000, cpu, None, latency)


def latency_of(found: Mapping[str, Any]) -> Latency:
    """Return the latencies of fio's `clat_ns`."""

    def at(percent: int) -> float:
        return float(found.get("percentile", {}).get(f"{percent}.000000", 0)) / 1e9

    return Latency(
        int(found["N"]), found["mean"] / 1e9, at(50), at(95), at(99), float(found["max"]) / 1e9
    )


def best_variants(try_one: Callable[[FioVariant], Sample], huge: bool = False) -> list[FioVariant]:
    """Return the fastest variant with preallocation and the fastest without.

    Args:
        try_one: runs a variant once, on a new file. `BenchError` rules the variant out.
        huge: use huge pages (if none works with them: ordinary ones).

    Raises:
        BenchError: fio cannot write there at all.
    """
    problem = BenchError("fio has no engine to try")
    # small pages, and then the page cache, only where nothing better works
    for direct, pages in [(True, True)] * huge + [(True, False), (False, False)]:
        best: dict[bool, tuple[float, FioVariant]] = {}
        for engine, block, preallocate in itertools.product(ENGINES, BLOCKS, (True, False)):
            variant = FioVariant(engine, block, preallocate, direct, huge=pages)
            try:
                bandwidth = try_one(variant).bandwidth
            except BenchError as error:
                problem = error
                continue
            if bandwidth > best.get(preallocate, (0.0, variant))[0]:
                best[preallocate] = bandwidth, variant
        if best:
            return [variant for _, variant in best.values()]
    raise problem


def fresh_variant(best: FioVariant) -> FioVariant:
    """Return the variant that writes data as a checkpoint's are: fresh, and on ordinary pages."""
    return replace(best, huge=False, fresh=True)


def fio_row(variant: FioVariant, nbytes: int) -> Row:
    """Return a row of fio."""
    return Row(str(variant), DURABLE, lambda path: run_fio(variant, path, nbytes))
