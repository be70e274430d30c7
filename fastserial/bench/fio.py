"""fio, the reference: what the device gives to a program that does nothing else."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fastserial.bench.measure import BenchError, Sample
from fastserial.bench.rotation import DURABLE, Row
from fastserial.bench.state import chill
from fastserial.reports import Latency

__all__ = [
    "NOT_INSTALLED",
    "READ",
    "FioSettings",
    "best_read",
    "best_write",
    "fio_row",
    "installed",
    "read_file",
    "run_fio",
]

READ = "fio read"
NOT_INSTALLED = "not installed: apt-get install fio"
_ENGINES = ("io_uring", "libaio")
_BLOCKS = (1 << 20, 4 << 20, 8 << 20)
_DEPTH = 8
_ERROR_LINES = 3
# glibc then asks for huge pages, as fastserial does: without them, fio wrote half as fast
_HUGE_PAGES = "glibc.malloc.hugetlb=1"


class FioSettings(NamedTuple):
    """Settings of one run of fio: engine, block size (bytes), preallocation, direct I/O."""

    engine: str
    block: int
    preallocate: bool = False
    direct: bool = True

    def __str__(self) -> str:
        extras = ", prealloc" if self.preallocate else ""
        extras += "" if self.direct else ", buffered"
        return f"fio {self.engine} {self.block >> 20}MiB×{_DEPTH}{extras}"


def installed() -> bool:
    """Return whether fio can be run."""
    return shutil.which("fio") is not None


def run_fio(settings: FioSettings, path: Path, nbytes: int, jobs: int = 1) -> Sample:
    """Write a new file of about `nbytes` bytes with fio, its final fsync included.

    The preallocation is not in fio's time, nor is its start. Several jobs write a part each.

    Raises:
        BenchError: fio failed, with its message.
    """
    blocks = max(1, round(nbytes / settings.block / jobs))
    part = blocks * settings.block
    options = ["--end_fsync=1", f"--fallocate={'native' if settings.preallocate else 'none'}"]
    options += [f"--numjobs={jobs}", f"--offset_increment={part}", f"--filesize={part * jobs}"]
    return _run(settings, path, "write", blocks, options)


def read_file(settings: FioSettings, path: Path, jobs: int = 1) -> Sample:
    """Read a file once, in whole blocks. Several jobs read a part each.

    Raises:
        BenchError: fio failed, with its message.
    """
    blocks = max(1, path.stat().st_size // settings.block // jobs)
    options = ["--readonly", f"--numjobs={jobs}", f"--offset_increment={blocks * settings.block}"]
    return _run(settings, path, "read", blocks, options)


def _run(
    settings: FioSettings,
    path: Path,
    direction: Literal["read", "write"],
    blocks: int,
    options: Sequence[str],
) -> Sample:
    command = [
        "fio",
        "--name=fastserial-bench",
        # fio takes a colon for the end of a file name
        f"--filename={str(path).replace(':', chr(92) + ':')}",
        f"--rw={direction}",
        f"--size={blocks * settings.block}",
        f"--bs={settings.block}",
        f"--ioengine={settings.engine}",
        f"--iodepth={_DEPTH}",
        f"--direct={int(settings.direct)}",
        *options,
        "--thread",
        "--group_reporting",
        "--output-format=json",
    ]
    tunables = ":".join(filter(None, (os.environ.get("GLIBC_TUNABLES"), _HUGE_PAGES)))
    environment = {**os.environ, "GLIBC_TUNABLES": tunables}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    try:
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    except (ValueError, LookupError):
        job = None
    if done.returncode or job is None or job["error"] or not job[direction]["runtime"]:
        words = (done.stderr or done.stdout).strip().splitlines()[:_ERROR_LINES]
        raise BenchError(f"{settings} failed: {' '.join(words)}")
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


def best_write(try_one: Callable[[FioSettings], Sample]) -> FioSettings:
    """Return the settings that write fastest; through the page cache if direct I/O is refused.

    Args:
        try_one: writes a new file once. `BenchError` rules the settings out.

    Raises:
        BenchError: fio cannot write there at all.
    """
    try:
        return _fastest(try_one, preallocate=(True, False))
    except BenchError:
        return _fastest(try_one, preallocate=(True, False), direct=False)


def best_read(path: Path, say: Callable[[str], None], jobs: int = 1) -> FioSettings:
    """Return the settings that read a file fastest, with nothing of it in the page cache.

    Raises:
        BenchError: fio is not installed, or cannot read it.
    """
    if not installed():
        raise BenchError(NOT_INSTALLED)

    def try_one(settings: FioSettings) -> Sample:
        say(f"looking for the best read: {settings}")
        chill((path,))
        return read_file(settings, path, jobs)

    return _fastest(try_one)


def _fastest(
    try_one: Callable[[FioSettings], Sample],
    preallocate: Sequence[bool] = (False,),
    direct: bool = True,
) -> FioSettings:
    found: dict[FioSettings, float] = {}
    problem = BenchError("fio has no engine to try")
    for engine, block, reserves in itertools.product(_ENGINES, _BLOCKS, preallocate):
        settings = FioSettings(engine, block, reserves, direct)
        try:
            found[settings] = try_one(settings).bandwidth
        except BenchError as error:
            problem = error
    if not found:
        raise problem
    return max(found, key=found.__getitem__)


def fio_row(settings: FioSettings, nbytes: int) -> Row:
    """Return a row of fio."""
    return Row(str(settings), DURABLE, lambda path: run_fio(settings, path, nbytes))
