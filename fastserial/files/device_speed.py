"""Whether the device below a file is faster than the page cache, found out by writing to it.

Stock torch leaves what it saved in the page cache. Where that costs no time, on a device that is
waited for either way, saves do so, too; on a faster device direct I/O is. The first large save to
a device finds out which it is: its first `TRIAL` bytes go through the page cache, and how long the
device takes to get them is timed. No answer is for ever (`FAST_FOR`, `SLOW_FOR`); that a device is
fast holds on as long as direct saves to it are.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from time import perf_counter
from typing import NamedTuple

from fastserial.config.performance import FAST_DEVICE, FAST_FOR, SLOW_FOR, TRIAL

__all__ = ["Timing", "begin_writeback", "is_fast"]

_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4
_NOT_HERE = (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP, errno.EPERM)

_sync_file_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)


class _Verdict(NamedTuple):
    """Whether a device was fast, and when that was (`perf_counter()`)."""

    fast: bool
    at: float


_verdicts: dict[int, _Verdict] = {}  # by the number of the device


def is_fast(fd: int) -> bool | None:
    """Return whether the device of an open file is fast, None if that is to be measured."""
    found = _verdicts.get(os.fstat(fd).st_dev)
    if found is None or perf_counter() - found.at > (FAST_FOR if found.fast else SLOW_FOR):
        return None
    return found.fast


def begin_writeback(fd: int, offset: int, length: int) -> None:
    """Let the device begin with a range that is in the page cache.

    Raises:
        OSError: the device failed.
    """
    _sync(fd, offset, length, _WRITE)


class Timing:
    """How long a device takes for the blocks of one file: on trial, or written directly."""

    def __init__(self, fd: int) -> None:
        """Begin when the first block is to be written to the file of a descriptor."""
        self._fd = fd
        self._began = perf_counter()
        self._nbytes = 0  # that were taken,
        self._first = self._end = 0  # from here to there: there may be holes between

    def take(self, offset: int, length: int) -> None:
        """Note a range that is to be written."""
        if not self._nbytes:
            self._first = self._end = offset
        self._first = min(self._first, offset)
        self._end = max(self._end, offset + length)
        self._nbytes += length

    @property
    def is_enough(self) -> bool:
        """Whether so much was taken that it shows how fast the device is."""
        return self._nbytes >= TRIAL

    def judge(self) -> bool:
        """Write back what was written on trial; return whether the device is fast.

        Raises:
            OSError: the device failed.
        """
        began = perf_counter()
        flags = _WAIT_BEFORE | _WRITE | _WAIT_AFTER
        if not _sync(self._fd, self._first, self._end - self._first, flags):
            return False
        device = os.fstat(self._fd).st_dev
        # without a block device (network, FUSE) the writes themselves may have waited for it,
        # and those to a file opened with O_SYNC or O_DSYNC, which is part of it, did
        waited = not os.major(device) or fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_DSYNC
        ended = perf_counter()
        fast = self._nbytes > (ended - (self._began if waited else began)) * FAST_DEVICE
        _verdicts[device] = _Verdict(fast, ended)
        return fast

    def confirm(self) -> None:
        """Keep that the device is fast if it was for all of a large file, written directly.

        A file that took long says nothing: its bytes may have been late.
        """
        device, now = os.fstat(self._fd).st_dev, perf_counter()
        known = _verdicts.get(device)
        enough = self._nbytes >= max(2 * TRIAL, (now - self._began) * FAST_DEVICE)
        if known is not None and known.fast and enough:
            _verdicts[device] = _Verdict(True, now)


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
