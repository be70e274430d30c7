"""How much of a file is in the page cache, without touching it.

`cachestat(2)` (Linux 6.5) counts the pages of a range. Where it is missing or not allowed, a few
bytes are asked for with `RWF_NOWAIT`, which fails where a read would have to wait for the disk.
"""

from __future__ import annotations

import ctypes
import os
from mmap import PAGESIZE

__all__ = ["cached_bytes", "cached_fraction"]

_CACHESTAT = 451  # the same on every architecture
_PROBES = 4

_libc = ctypes.CDLL(None, use_errno=True)


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
