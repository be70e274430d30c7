"""Proof that a transfer happened, for I/O whose result is not reported.

Writes: the file system knows which blocks of a file were never written. A block that was reserved
or skipped reads as a hole (`lseek(SEEK_HOLE)`), and direct I/O makes it data only when the device
has taken it. So a region that is a hole before the write and data after it was written. A region
that holds data already proves nothing, nor does a file system that has no holes.

Reads: each sector of the buffer is marked with a random value first. A mark still there was not
read over (or, one time in 2^64, is in the file).
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["SECTOR", "ReadMarks", "is_blank", "is_written"]

SECTOR = 512


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


class ReadMarks:
    """Random marks in the sectors of a buffer."""

    def __init__(self) -> None:
        self._value = int.from_bytes(secrets.token_bytes(8), "little", signed=True)

    def put(self, tensor: torch.Tensor) -> None:
        """Mark each sector of a byte tensor whose size is a multiple of `SECTOR`."""
        self._of(tensor).fill_(self._value)

    def left(self, tensor: torch.Tensor) -> bool:
        """Tell whether any mark is still there."""
        return bool((self._of(tensor) == self._value).any())

    @staticmethod
    def _of(tensor: torch.Tensor) -> torch.Tensor:
        import torch

        return tensor.view(torch.int64)[:: SECTOR // ctypes.sizeof(ctypes.c_int64)]
