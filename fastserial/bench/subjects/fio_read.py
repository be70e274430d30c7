"""fio's reads of a file, the yardstick of loads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.measure import Sample
from fastserial.bench.measuring.pages import reserved_huge_bytes
from fastserial.bench.measuring.temperature import chill
from fastserial.bench.subjects import fio

__all__ = ["FIO", "FIO_HUGE", "FioRead", "best_reads"]

FIO = "fio read"
FIO_HUGE = "fio read, huge pages"


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


def best_reads(
    path: Path, missing: dict[str, str], say: Callable[[str], None]
) -> dict[str, FioRead]:
    """Return fio's fastest ways to read a file by name: as it is, and on reserved huge pages.

    Why one is not there is put in `missing`.
    """
    if not fio.installed():
        missing[FIO] = "not installed: apt-get install fio"
        return {}
    found = {FIO: _fastest(path, False, FIO, missing, say)}
    if reserved_huge_bytes() >= fio.HUGE_BYTES:
        found[FIO_HUGE] = _fastest(path, True, FIO_HUGE, missing, say)
    return {name: one for name, one in found.items() if one is not None}


def _fastest(
    path: Path, huge: bool, name: str, missing: dict[str, str], say: Callable[[str], None]
) -> FioRead | None:
    best: tuple[float, FioRead] | None = None
    for engine, block in itertools.product(fio.ENGINES, fio.BLOCKS):
        say(f"looking for the best {name}: {engine}, {block >> 20}MiB")
        one = FioRead(path, engine, block, huge)
        try:
            chill((path,))
            bandwidth = one.run().bandwidth
        except BenchError as error:
            missing[name] = str(error)
            continue
        if best is None or bandwidth > best[0]:
            best = bandwidth, one
    if best is None:
        return None
    missing.pop(name, None)
    return best[1]
