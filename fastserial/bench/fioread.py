"""fio's reads of a file, the yardstick of loads."""

from __future__ import annotations

import itertools
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
        options = [
            "--rw=read",
            "--readonly",
            f"--size={self.path.stat().st_size // self.block * self.block}",
            f"--bs={self.block}",
            f"--ioengine={self.engine}",
            f"--iodepth={fio.DEPTH}",
            "--direct=1",
        ]
        return fio.run_job(options, self.path, "read", self.huge, "fio")


def best_read(path: Path, missing: dict[str, str], say: Callable[[str], None]) -> FioRead | None:
    """Return fio's fastest way to read a file; None, and why in `missing`, if there is none."""
    if not fio.installed():
        missing[FIO] = "not installed: apt-get install fio"
        return None
    huge = reserved_huge_bytes() >= fio.HUGE_BYTES
    best: tuple[float, FioRead] | None = None
    for pages in [True] * huge + [False]:
        for engine, block in itertools.product(fio.ENGINES, fio.BLOCKS):
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
