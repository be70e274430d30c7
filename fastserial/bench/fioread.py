"""fio's reads of a file, the yardstick of loads."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastserial.bench import fio
from fastserial.bench.errors import BenchError
from fastserial.bench.measure import Sample
from fastserial.bench.pages import reserved_huge_bytes
from fastserial.bench.temperature import chill

__all__ = ["FIO", "FioRead", "best_read"]

FIO = "fio read"
_BLOCKS = (1 << 20, 4 << 20, 8 << 20)
_ENGINES = ("io_uring", "libaio")


@dataclass(frozen=True, slots=True)
class FioRead:
    """One way in which fio reads a file: engine and block size (bytes).

    `huge`: its buffers are reserved huge pages.
    """

    path: Path
    engine: str
    block: int
    huge: bool = False

    def run(self) -> Sample:
        """Read the file once.

        Raises:
            BenchError: fio failed.
        """
        return _read(self)


def best_read(path: Path, missing: dict[str, str], say: Callable[[str], None]) -> FioRead | None:
    """Return fio's fastest way to read a file; None, and why in `missing`, if there is none."""
    if not fio.installed():
        missing[FIO] = "not installed: apt-get install fio"
        return None
    huge = reserved_huge_bytes() >= fio.HUGE_BYTES
    best: tuple[float, FioRead] | None = None
    for pages in [True] * huge + [False]:
        for engine, block in itertools.product(_ENGINES, _BLOCKS):
            say(f"looking for fio's best: {engine}, {block >> 20}MiB")
            one = FioRead(path, engine, block, pages)
            try:
                chill((path,))
                bandwidth = one.run().bandwidth
            except BenchError as error:
                missing[FIO] = str(error)
                continue
            if best is None or bandwidth > best[0]:
                best = bandwidth, one
        if best is not None:
            missing.pop(FIO, None)
            return best[1]
    return None


def _read(how: FioRead) -> Sample:
    command = [
        "fio",
        "--name=fastserial-bench",
        f"--filename={str(how.path).replace(':', chr(92) + ':')}",
        "--rw=read",
        "--readonly",
        f"--size={how.path.stat().st_size // how.block * how.block}",
        f"--bs={how.block}",
        f"--ioengine={how.engine}",
        "--iodepth=8",
        f"--iomem={'mmaphuge' if how.huge else 'malloc'}",
        "--direct=1",
        "--thread",
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        read = job["read"]
        if done.returncode or job["error"] or not read["runtime"]:
            raise ValueError
    except (ValueError, LookupError):
        words = (done.stderr or done.stdout).strip().splitlines()[:3]
        raise BenchError(f"fio failed: {' '.join(words)}") from None
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    latency = fio.latency_of(read["clat_ns"])
    return Sample(read["io_bytes"], read["runtime"] / 1000, cpu, None, latency)
