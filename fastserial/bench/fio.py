"""fio, the reference: what the device gives to a program that does nothing else."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from fastserial.bench.measure import BenchError, Sample

_ENGINES = ("io_uring", "libaio")
_BLOCKS = (1 << 20, 4 << 20, 8 << 20)
_DEPTH = 8
_ERROR_LINES = 3
# glibc then asks for huge pages, as fastserial does: without them, fio wrote half as fast
_HUGE_PAGES = "glibc.malloc.hugetlb=1"


class FioSettings(NamedTuple):
    """Settings of one run of fio: engine, block size (bytes), direct I/O."""

    engine: str
    block: int
    direct: bool = True

    def __str__(self) -> str:
        buffered = "" if self.direct else ", buffered"
        return f"fio {self.engine} {self.block >> 20}MiB×{_DEPTH}{buffered}"


def installed() -> bool:
    """Return whether fio can be run."""
    return shutil.which("fio") is not None


def run_fio(settings: FioSettings, path: Path, nbytes: int, jobs: int = 1) -> Sample:
    """Write a new file of about `nbytes` bytes with fio, its final fsync included.

    fio's start is not in its time, nor is the reservation of space. Several jobs write a part each.

    Raises:
        BenchError: fio failed, with its message.
    """
    blocks = max(1, round(nbytes / settings.block / jobs))
    whole = blocks * settings.block * jobs
    options = ("--end_fsync=1", "--fallocate=native", f"--filesize={whole}")
    return _run(settings, path, "write", blocks, jobs, *options)


def read_file(settings: FioSettings, path: Path, jobs: int = 1) -> Sample:
    """Read a file once, in whole blocks. Several jobs read a part each.

    Raises:
        BenchError: fio failed, with its message.
    """
    blocks = max(1, path.stat().st_size // settings.block // jobs)
    return _run(settings, path, "read", blocks, jobs, "--readonly")


def _run(
    settings: FioSettings,
    path: Path,
    direction: Literal["read", "write"],
    blocks: int,
    jobs: int,
    *options: str,
) -> Sample:
    part = blocks * settings.block
    command = [
        "fio",
        "--name=fastserial-bench",
        # fio takes a colon for the end of a file name
        f"--filename={str(path).replace(':', chr(92) + ':')}",
        f"--rw={direction}",
        f"--size={part}",
        f"--bs={settings.block}",
        f"--ioengine={settings.engine}",
        f"--iodepth={_DEPTH}",
        f"--direct={int(settings.direct)}",
        f"--numjobs={jobs}",
        f"--offset_increment={part}",
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
    return Sample(moved["io_bytes"], moved["runtime"] / 1000, cpu)


def best(once: Callable[[FioSettings], Sample]) -> FioSettings:
    """Return the settings with which fio is fastest; through the page cache if it must be.

    Args:
        once: writes a new file, or reads one that is not in the page cache. `BenchError` rules the
            settings out.

    Raises:
        BenchError: fio is not installed, or cannot do it at all.
    """
    if not installed():
        raise BenchError("not installed: apt-get install fio")
    problem = BenchError("fio has no engine to try")
    for direct in (True, False):
        found: dict[FioSettings, float] = {}
        for engine, block in itertools.product(_ENGINES, _BLOCKS):
            settings = FioSettings(engine, block, direct)
            try:
                found[settings] = once(settings).bandwidth
            except BenchError as error:
                problem = error
        if found:
            return max(found, key=found.__getitem__)
    raise problem
