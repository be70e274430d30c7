"""What goes through the page cache, and what past it.

A node is to read a byte from its disk no more often than it would with stock torch: several
processes that load one file share what any of them reads, and so do a second load and a load after
a save. Direct I/O gives that up. So

- loads read through the page cache any file it has room for;
- saves write through it on a device that is slower than the page cache, where that costs no time,
  and directly on a faster one (`files.device_speed`).

What is in the cache, `cachestat(2)` tells (Linux 6.5), which counts the pages of a range. Where it
is missing or not allowed, a few bytes are asked for with `RWF_NOWAIT`, which fails where a read
would have to wait for the disk.
"""

from __future__ import annotations

import ctypes
import os
from mmap import PAGESIZE

from fastserial.config import Config
from fastserial.config.performance import ALWAYS_FITS
from fastserial.files.meminfo import available_bytes

__all__ = [
    "cached_bytes",
    "cached_fraction",
    "fits",
    "reads_through_cache",
]

_libc = ctypes.CDLL(None, use_errno=True)


def fits(nbytes: int) -> bool:
    """Return whether the page cache has room for that many bytes."""
    if nbytes <= ALWAYS_FITS:
        return True
    available = available_bytes()
    return available is None or nbytes <= available


def reads_through_cache(config: Config, nbytes: int) -> bool:
    """Return whether all of a file of `nbytes` bytes is read through the page cache.

    Otherwise only what is in it already, and the rest directly.
    """
    if config.never_direct or config.direct is True or config.cache == "drop":
        return config.never_direct
    return config.cache == "keep" or fits(nbytes)


_CACHESTAT = 451  # the same on every architecture
_PROBES = 4


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Counts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def cached_bytes(fd: int, offset: int, length: int) -> int | None:
    """Return how many bytes of a file's range are in the page cache, None if the kernel won't tell.

    Whole pages are counted, so the result may exceed `length` by almost two of them. Huge pages of
    tmpfs and hugetlbfs count as well.
    """
    counts = _Counts()
    wanted = _Range(offset, length)
    if _libc.syscall(_CACHESTAT, fd, ctypes.byref(wanted), ctypes.byref(counts), 0) != 0:
        return None
    return int(counts.cached) * PAGESIZE


def cached_fraction(fd: int, offset: int, length: int) -> float | None:
    """Return the part of a file's range that is in the page cache, 0.0 to 1.0.

    Without `cachestat` it is an estimate from a few bytes; None: the system does not tell.
    """
    if length <= 0:
        return None
    start = offset - offset % PAGESIZE
    pages = -(-(offset + length - start) // PAGESIZE)
    cached = cached_bytes(fd, start, pages * PAGESIZE)
    return _probe(fd, offset, length) if cached is None else min(1.0, cached / (pages * PAGESIZE))


def _probe(fd: int, offset: int, length: int) -> float | None:
    nowait = getattr(os, "RWF_NOWAIT", None)
    if nowait is None:
        return None
    places = sorted({offset + (length - 1) * step // (_PROBES - 1) for step in range(_PROBES)})
    byte = bytearray(1)
    present = 0
    for place in places:
        try:
            present += os.preadv(fd, [byte], place, nowait)
        except BlockingIOError:
            continue
        except OSError:  # a file system without it
            return None
    return present / len(places)
