"""What goes through the page cache, and what past it.

A node is to read a byte from its disk no more often than it would with stock torch: several
processes that load one file share what any of them reads, and so do a second load and a load after
a save. Direct I/O gives that up. So

- loads read through the page cache any file it has room for;
- saves write through it on a device that is slower than the page cache's way, where that costs no
  time, and directly on a faster one. How fast a device is, the first large save to it finds out;
  one that was slow, perhaps because it was busy, is measured again a minute later.

What is in the cache, `cachestat(2)` tells (Linux 6.5), which counts the pages of a range. Where it
is missing or not allowed, a few bytes are asked for with `RWF_NOWAIT`, which fails where a read
would have to wait for the disk.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import os
from mmap import PAGESIZE
from time import perf_counter

from fastserial.config import Config
from fastserial.config.performance import ALWAYS_FITS, FAST_DEVICE, SLOW_FOR, TRIAL
from fastserial.files.meminfo import available_bytes

__all__ = [
    "CachedWrites",
    "cached_bytes",
    "cached_fraction",
    "cached_writes",
    "fits",
    "reads_through_cache",
]

_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
_NOT_HERE = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP, errno.EPERM)

_libc = ctypes.CDLL(None, use_errno=True)
_sync_file_range = getattr(_libc, "sync_file_range", None)
# By the number of the device, and whether it is about short files, which may end before a trial
# does: for those alone a throttle or a disk's cache may be fast.
_fast: dict[tuple[int, bool], bool] = {}
_slow_since: dict[tuple[int, bool], float] = {}  # `perf_counter()` of the verdict


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


def cached_writes(fd: int, config: Config, nbytes: int, synced: bool) -> CachedWrites | None:
    """Return what writes a new file's blocks through the page cache, or None: directly.

    Args:
        fd: of the file.
        config: `direct` is not False.
        nbytes: of the whole file, as far as known.
        synced: the save waits for the device at the end.
    """
    if config.direct is True or config.cache == "drop":
        return None
    if config.cache == "keep":
        return CachedWrites(fd, synced, False)
    device, short = os.fstat(fd).st_dev, 0 < nbytes < 2 * TRIAL
    large = _verdict((device, False))
    own = _verdict((device, True)) if short else None
    fast = large or (large if own is None else own)
    if fast or not fits(nbytes):
        return None
    return CachedWrites(fd, synced, fast is None, short)


def _verdict(key: tuple[int, bool]) -> bool | None:
    """Return whether a device is fast, None if it is to be measured, or measured again.

    A disk that was busy, or cold, is slow for a while only.
    """
    if perf_counter() - _slow_since.get(key, math.inf) > SLOW_FOR:
        _slow_since.pop(key, None)
        _fast.pop(key, None)
    return _fast.get(key)


class CachedWrites:
    """Blocks of a file that go through the page cache, and on to the device without delay."""

    def __init__(self, fd: int, synced: bool, on_trial: bool, short: bool = False) -> None:
        """Take what `cached_writes` found out.

        Args:
            on_trial: the device is to be measured.
            short: the file may end before there is enough of it.
        """
        self.on_trial = on_trial
        self._fd = fd
        self._synced = synced
        self._short = short
        self._began = perf_counter()
        self._nbytes = 0  # on trial,
        self._place = 0, 0  # from here to there: there may be holes between

    def take(self, offset: int, length: int) -> None:
        """Note a range that is to be written on trial."""
        first, end = self._place if self._nbytes else (offset, offset)
        self._place = min(first, offset), max(end, offset + length)
        self._nbytes += length

    @property
    def is_enough(self) -> bool:
        """Whether so much was written on trial that `judge` can tell."""
        return self._nbytes >= TRIAL

    def conclude(self) -> None:
        """Judge by a short file that ends now, if its save waits for the device.

        Not by little, which takes as long as the call does, nor where others write in between.

        Raises:
            OSError: the device failed.
        """
        first, end = self._place
        enough = self._nbytes >= TRIAL // 4 and end - first <= 2 * self._nbytes
        if self.on_trial and self._short and self._synced and enough:
            self.judge()

    def wrote(self, offset: int, length: int) -> None:
        """Start to write a range back that is in the page cache now.

        Raises:
            OSError: the device failed.
        """
        if self._synced and not self.on_trial:
            self._sync(offset, length, _WRITE)

    def judge(self) -> bool:
        """Write back what was written on trial; return whether the device is fast.

        Raises:
            OSError: the device failed.
        """
        self.on_trial = False
        began = perf_counter()
        first, end = self._place
        if not self._sync(first, end - first, _WAIT_BEFORE | _WRITE | _WAIT_AFTER):
            return False
        device = os.fstat(self._fd).st_dev
        # without a block device (network, FUSE) the writes themselves may have waited for it,
        # and those to a file opened with O_SYNC or O_DSYNC, which is part of it, did
        waited = not os.major(device) or fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_DSYNC
        took = perf_counter() - (self._began if waited else began)
        key = device, self._short
        fast = _fast[key] = self._nbytes > took * FAST_DEVICE
        if not fast:
            _slow_since[key] = perf_counter()
        return fast

    def _sync(self, offset: int, length: int, flags: int) -> bool:
        """Return False where there is no such call."""
        if _sync_file_range is None:
            return False
        place = ctypes.c_int64(offset), ctypes.c_int64(length)
        if _sync_file_range(self._fd, *place, ctypes.c_uint(flags)) == 0:
            return True
        number = ctypes.get_errno()
        if number in _NOT_HERE:
            return False
        raise OSError(number, os.strerror(number))  # the sync at the end would not tell it again


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
