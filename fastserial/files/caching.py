"""Which bytes pass through the page cache, and which are read and written directly.

A node should read a byte from its disk no more often than with stock torch: several processes that
load one file share what each of them reads, and a second load, or a load after a save, finds it in
memory. Direct I/O loses that. So

- loads read any file through the page cache that fits in it;
- saves write through it to a device that is slower than the page cache, where that costs no time
  because the device is waited for in any case, and directly to a faster one.

The first large save to a device measures it: the first `TRIAL` bytes go through the page cache, and
the time that the device takes for them is measured. A result expires (`FAST_FOR`, `SLOW_FOR`).

`cachestat(2)` (Linux 6.5) counts the pages of a range that are in the cache. Where it is missing or
forbidden, a few bytes are read with `RWF_NOWAIT`, which fails where a read would wait for the disk.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from math import inf
from mmap import PAGESIZE
from time import perf_counter

from fastserial.config import Config
from fastserial.config.performance import ALWAYS_FITS, FAST_DEVICE, FAST_FOR, SLOW_FOR, TRIAL
from fastserial.files.linux import available_bytes

_libc = ctypes.CDLL(None, use_errno=True)


def fits(nbytes: int) -> bool:
    """Return whether that many bytes fit in the page cache."""
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
_COUNTS = 5  # of pages: cached, dirty, being written, evicted, recently evicted
_PROBES = 4


def cached_bytes(fd: int, offset: int, length: int) -> int | None:
    """Return how many bytes of a file's range are in the page cache, None if it is unknown.

    Whole pages are counted, so the result may exceed `length` by almost two of them. Huge pages of
    tmpfs and hugetlbfs count as well.
    """
    counts = (ctypes.c_uint64 * _COUNTS)()
    wanted = (ctypes.c_uint64 * 2)(offset, length)
    if _libc.syscall(_CACHESTAT, fd, wanted, counts, 0) != 0:
        return None
    return int(counts[0]) * PAGESIZE


def cached_fraction(fd: int, offset: int, length: int) -> float | None:
    """Return the part of a file's range that is in the page cache, 0.0 to 1.0.

    Without `cachestat` it is an estimate from a few bytes; None: it is unknown.
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
    offsets = sorted({offset + (length - 1) * step // (_PROBES - 1) for step in range(_PROBES)})
    byte = bytearray(1)
    present = 0
    for at in offsets:
        try:
            present += os.preadv(fd, [byte], at, nowait)
        except BlockingIOError:
            continue
        except OSError:  # a file system without it
            return None
    return present / len(offsets)


_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
_NOT_HERE = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP, errno.EPERM)

_sync_file_range = getattr(_libc, "sync_file_range", None)


_speeds: dict[int, tuple[bool, float]] = {}  # by device: whether it is fast, and when it was found


def is_fast(fd: int) -> bool | None:
    """Return whether the device of an open file is fast, None if that is to be measured."""
    fast, at = _speeds.get(os.fstat(fd).st_dev, (False, -inf))
    return None if perf_counter() - at > (FAST_FOR if fast else SLOW_FOR) else fast


def begin_writeback(fd: int, offset: int, length: int) -> None:
    """Start to write a range that is in the page cache to the device.

    Raises:
        OSError: the device failed.
    """
    _sync(fd, offset, length, _WRITE)


class Trial:
    """How long a device takes for the first blocks of a file, which go through the page cache."""

    def __init__(self, fd: int) -> None:
        """Begin when the first block is to be written to the file of a descriptor."""
        self._fd = fd
        self._began = perf_counter()
        self._nbytes = 0  # that were taken,
        self._first: float = inf  # from here
        self._end = 0  # to there: there may be holes between

    def take(self, offset: int, length: int) -> None:
        """Note a range that is to be written."""
        self._first = min(self._first, offset)
        self._end = max(self._end, offset + length)
        self._nbytes += length

    @property
    def is_enough(self) -> bool:
        """Whether so much was taken that it shows how fast the device is."""
        return self._nbytes >= TRIAL

    def judge(self) -> bool:
        """Write back what was taken; return whether the device is fast.

        Raises:
            OSError: the device failed.
        """
        began, first = perf_counter(), int(self._first)
        flags = _WAIT_BEFORE | _WRITE | _WAIT_AFTER
        if not _sync(self._fd, first, self._end - first, flags):
            return False
        device = os.fstat(self._fd).st_dev
        # without a block device (network, FUSE) the writes themselves may have waited for it,
        # and those to a file opened with O_SYNC or O_DSYNC, which is part of it, did
        waited = not os.major(device) or fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_DSYNC
        ended = perf_counter()
        fast = self._nbytes > (ended - (self._began if waited else began)) * FAST_DEVICE
        _speeds[device] = fast, ended
        return fast


def _sync(fd: int, offset: int, length: int, flags: int) -> bool:
    """Return False where there is no such call."""
    if _sync_file_range is None:
        return False
    span = ctypes.c_int64(offset), ctypes.c_int64(length)
    if _sync_file_range(fd, *span, ctypes.c_uint(flags)) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_HERE:
        return False
    raise OSError(number, os.strerror(number))  # the sync at the end would not report it again
