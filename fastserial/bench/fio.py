"""fio, the reference: what the device gives to a program that does nothing else."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fastserial.bench.measure import BenchError, Sample
from fastserial.bench.rotation import DURABLE, Row
from fastserial.bench.state import chill, reserved_huge_bytes
from fastserial.reports import Latency

__all__ = [
    "HUGE_BYTES",
    "READ",
    "FioVariant",
    "best_reads",
    "best_variants",
    "fio_row",
    "fresh_variant",
    "installed",
    "read_file",
    "run_fio",
]

READ = "fio read"
_READ_HUGE = "fio read, huge pages"
_ENGINES = ("io_uring", "libaio")
_BLOCKS = (1 << 20, 4 << 20, 8 << 20)
_DEPTH = 8
HUGE_BYTES = (_DEPTH + 2) * _BLOCKS[-1]  # of reserved huge pages, for its buffers
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
    depth: int = _DEPTH
    huge: bool = False
    fresh: bool = False

    def __str__(self) -> str:
        extras = ", prealloc" if self.preallocate else ""
        extras += ("" if self.direct else ", buffered") + (", huge pages" if self.huge else "")
        depth = ", fresh data" if self.fresh else f"×{self.depth}"
        return f"fio {self.engine} {self.block >> 20}MiB{depth}{extras}"


def installed() -> bool:
    """Return whether fio can be run."""
    return shutil.which("fio") is not None


def run_fio(variant: FioVariant, path: Path, nbytes: int, jobs: int = 1) -> Sample:
    """Write a new file of about `nbytes` bytes with fio, its final fsync included.

    The preallocation is not in fio's time, nor is its start. Several jobs write a part each.

    Raises:
        BenchError: fio failed, with its message.
    """
    blocks = max(1, round(nbytes / variant.block / jobs))
    depth = blocks if variant.fresh else variant.depth
    part = blocks * variant.block
    options = ["--end_fsync=1", f"--fallocate={'native' if variant.preallocate else 'none'}"]
    options += [f"--numjobs={jobs}", f"--offset_increment={part}", f"--filesize={part * jobs}"]
    return _run(variant, path, "write", blocks, depth, options)


def read_file(variant: FioVariant, path: Path, jobs: int = 1) -> Sample:
    """Read a file once, in whole blocks. Several jobs read a part each.

    Raises:
        BenchError: fio failed, with its message.
    """
    blocks = max(1, path.stat().st_size // variant.block // jobs)
    options = ["--readonly", f"--numjobs={jobs}", f"--offset_increment={blocks * variant.block}"]
    return _run(variant, path, "read", blocks, variant.depth, options)


def _run(
    variant: FioVariant,
    path: Path,
    direction: Literal["read", "write"],
    blocks: int,
    depth: int,
    options: Sequence[str],
) -> Sample:
    command = [
        "fio",
        "--name=fastserial-bench",
        # fio takes a colon for the end of a file name
        f"--filename={str(path).replace(':', chr(92) + ':')}",
        f"--rw={direction}",
        f"--size={blocks * variant.block}",
        f"--bs={variant.block}",
        f"--ioengine={variant.engine}",
        f"--iodepth={depth}",
        f"--direct={int(variant.direct)}",
        *options,
        f"--iomem={'mmaphuge' if variant.huge else 'malloc'}",
        "--thread",
        "--group_reporting",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    except (ValueError, LookupError):
        job = None
    if done.returncode or job is None or job["error"] or not job[direction]["runtime"]:
        words = (done.stderr or done.stdout).strip().splitlines()[:_ERROR_LINES]
        raise BenchError(f"{variant} failed: {' '.join(words)}")
    moved = job[direction]
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    latency = _latency(moved["clat_ns"])
    return Sample(moved["io_bytes"], moved["runtime"] / 1000, cpu, None, latency)


def _latency(found: Mapping[str, Any]) -> Latency:
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
        found = []
        for preallocate in (True, False):
            try:
                found.append(_fastest(try_one, preallocate, direct, pages))
            except BenchError as error:
                problem = error
        if found:
            return found
    raise problem


def best_reads(
    path: Path, missing: dict[str, str], say: Callable[[str], None], jobs: int = 1
) -> dict[str, FioVariant]:
    """Return fio's fastest ways to read a file by name: as it is, and on reserved huge pages.

    Why one is not there is put in `missing`.
    """
    if not installed():
        missing[READ] = "not installed: apt-get install fio"
        return {}
    found = {}
    names = [READ] + [_READ_HUGE] * (reserved_huge_bytes() >= HUGE_BYTES)
    for name in names:

        def try_one(variant: FioVariant) -> Sample:
            say(f"looking for the best read: {variant}")
            chill((path,))
            return read_file(variant, path, jobs)

        try:
            found[name] = _fastest(try_one, huge=name == _READ_HUGE)
        except BenchError as error:
            missing[name] = str(error)
    return found


def _fastest(
    try_one: Callable[[FioVariant], Sample],
    preallocate: bool = False,
    direct: bool = True,
    huge: bool = False,
) -> FioVariant:
    """Return the fastest combination of engine and block size.

    Raises:
        BenchError: of the last one, if none works.
    """
    best: tuple[float, FioVariant] | None = None
    problem = BenchError("fio has no engine to try")
    for engine, block in itertools.product(_ENGINES, _BLOCKS):
        variant = FioVariant(engine, block, preallocate, direct, huge=huge)
        try:
            bandwidth = try_one(variant).bandwidth
        except BenchError as error:
            problem = error
            continue
        if best is None or bandwidth > best[0]:
            best = bandwidth, variant
    if best is None:
        raise problem
    return best[1]


def fresh_variant(best: FioVariant) -> FioVariant:
    """Return the variant that writes data as a checkpoint's are: fresh, and on ordinary pages."""
    return replace(best, huge=False, fresh=True)


def fio_row(variant: FioVariant, nbytes: int) -> Row:
    """Return a row of fio."""
    return Row(str(variant), DURABLE, lambda path: run_fio(variant, path, nbytes))
