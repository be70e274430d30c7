"""Files in the page cache, or not, before a load is timed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from fastserial.bench.measuring.errors import BenchError
from fastserial.files.caching import cached_fraction

__all__ = ["chill", "warm"]

_CHUNK = 8 << 20
_COLD, _WARM = 0.01, 0.99
_DROP = Path("/proc/sys/vm/drop_caches")


def chill(paths: Iterable[Path]) -> None:
    """Evict files from the page cache: nothing of them may be dirty or mapped.

    Raises:
        BenchError: they stay in it.
    """
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if _fraction(file.fileno(), path) > _COLD:
                with contextlib.suppress(OSError):  # root only
                    _DROP.write_text("1")
            if _fraction(file.fileno(), path) > _COLD:
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
            if _fraction(file.fileno(), path) < _WARM:
                raise BenchError(f"{path} does not stay in the page cache: too little memory")


def _fraction(fd: int, path: Path) -> float:
    return cached_fraction(fd, 0, path.stat().st_size) or 0.0
