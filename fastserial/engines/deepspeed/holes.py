"""Whether bytes of a file were written, for writes whose result is not reported.

The file system knows which blocks of a file were never written. One that was reserved or skipped
reads as a hole (`lseek(SEEK_HOLE)`), and direct I/O makes it data only when the device has taken
it. A region that holds data already tells nothing, nor does a file system that has no holes.
"""

from __future__ import annotations

import errno
import os

__all__ = ["is_blank", "is_written"]


def is_blank(fd: int, offset: int, length: int) -> bool:
    """Tell whether a region of a file holds no data yet, and the file system can tell when it does.

    The file grows to hold the region, for only within a file can a hole be told from the end.
    """
    end = offset + length
    try:
        if os.fstat(fd).st_size < end:
            os.ftruncate(fd, end)
        return os.lseek(fd, offset, os.SEEK_DATA) >= end
    except OSError as error:
        return error.errno == errno.ENXIO  # no data from `offset` to the end of the file


def is_written(fd: int, offset: int, length: int) -> bool:
    """Tell whether every block of a region that was blank has been written."""
    try:
        return os.lseek(fd, offset, os.SEEK_HOLE) >= offset + length
    except OSError:
        return False
