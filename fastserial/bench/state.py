"""The state of disk, page cache and memory before something is timed: the same for every row."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

from fastserial.bench.measure import BenchError
from fastserial.diagnosis.folder import folder_problem
from fastserial.files.destination import wait_until_free
from fastserial.files.linux import available_bytes, cached_fraction, meminfo
from fastserial.reports import format_bytes

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_SPARE = 1 << 30  # bytes of memory that are left to others
_CHUNK = 8 << 20
_COLD, _WARM = 0.01, 0.99  # of a file in the page cache
_DROP = Path("/proc/sys/vm/drop_caches")
_MADV_POPULATE_WRITE = 23  # Linux 5.14


@contextlib.contextmanager
def scratch(folder: Path, needed: int) -> Iterator[Path]:
    """Yield a new folder inside `folder`; it is removed after errors, Ctrl-C and SIGTERM, too.

    Args:
        folder: where to measure; it must exist.
        needed: bytes that must be free there.

    Raises:
        BenchError: the folder is missing or not writable, or there is too little space.
    """
    problem = folder_problem(folder)
    if problem is not None:
        raise BenchError(problem)
    stats = os.statvfs(folder)
    free = stats.f_bavail * stats.f_frsize
    if free < needed:
        raise BenchError(
            f"{folder} has {format_bytes(free)} free, {format_bytes(needed)} are needed: "
            "free some, or measure with less data"
        )
    with _signals_raise():
        try:
            made = Path(tempfile.mkdtemp(prefix=".fastserial-bench-", dir=folder))
        except OSError as error:
            raise BenchError(f"{folder} is not writable: {error.strerror}") from error
        try:
            yield made
        finally:
            shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Turn signals that would end the process at once into an exception."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    ending = [number for number in _SIGNALS if signal.getsignal(number) is signal.SIG_DFL]
    for number in ending:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)


# -- the disk ------------------------------------------------------------------------------------


def settle(pause: float) -> None:
    """Write all dirty pages back, wait until that is done, and `pause` seconds more; 0: do nothing.

    Replaced files are freed, too: that would slow down the next run.
    """
    if not pause:
        return
    wait_until_free()
    os.sync()
    time.sleep(pause)


# -- the page cache ------------------------------------------------------------------------------


def chill(paths: Iterable[Path]) -> None:
    """Evict files from the page cache: nothing of them may be dirty or mapped.

    Raises:
        BenchError: they stay in it.
    """
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if _cached(file.fileno(), path) > _COLD:
                with contextlib.suppress(OSError):  # root only
                    _DROP.write_text("1")
            if _cached(file.fileno(), path) > _COLD:
                raise BenchError(f"{path} stays in the page cache: its file system keeps it there")


def warm(paths: Iterable[Path]) -> None:
    """Read files, so that they are in the page cache.

    Raises:
        BenchError: memory is too short for that.
    """
    for path in paths:
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(_CHUNK)
            while file.readinto(buffer):
                pass
            if _cached(file.fileno(), path) < _WARM:
                raise BenchError(f"{path} does not stay in the page cache: too little memory")


def _cached(fd: int, path: Path) -> float:
    return cached_fraction(fd, 0, path.stat().st_size) or 0.0


# -- memory --------------------------------------------------------------------------------------


def check_memory(nbytes: int, advice: str = "give a smaller --size") -> None:
    """Refuse what would not fit into memory.

    Raises:
        BenchError: less than `nbytes` and some are available.
    """
    available = meminfo().get("MemAvailable", nbytes + _SPARE)
    if available < nbytes + _SPARE:
        raise BenchError(
            f"the data takes {format_bytes(nbytes)} of memory and {format_bytes(available)} are "
            f"available: {advice}"
        )


def fetch_free_memory(nbytes: int) -> None:
    """Take as much memory, at most half of what is available, and free it again.

    A virtual machine returns free memory to its host, and getting it back costs more than a load,
    in a random row. Small pages and huge pages have separate free lists, so both are used.
    """
    available = available_bytes()
    nbytes = nbytes if available is None else min(nbytes, available // 2)
    if not nbytes:
        return
    for advice in (mmap.MADV_NORMAL, mmap.MADV_HUGEPAGE):
        with (
            mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory,
            contextlib.suppress(OSError),  # an older kernel, or one without huge pages
        ):
            memory.madvise(advice)
            memory.madvise(_MADV_POPULATE_WRITE)
