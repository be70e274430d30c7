"""Reading blocks back from the device after writing them, to compare them with memory."""

from __future__ import annotations

import ctypes
import errno
import os

from fastserial import filesystem
from fastserial.engines import Request
from fastserial.interrupts import Descriptors
from fastserial.staging import BufferPool

__all__ = ["ReadBack"]

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class ReadBack:
    """Compares written blocks of one file with what the file holds.

    Reads past the page cache where blocks were written so. A block that went through the cache is
    read from it, which proves less.
    """

    def __init__(self, fd: int, direct: bool, block_size: int) -> None:
        """Open the file behind `fd` anew, for reading; `direct`: also past the page cache.

        Raises:
            OSError: the file may not be read.
        """
        self._files = Descriptors()
        self._fds = {False: filesystem.reopen(fd, os.O_RDONLY, self._files)}
        if direct:
            self._fds[True] = filesystem.reopen(fd, os.O_RDONLY | os.O_DIRECT, self._files)
        self._pool = BufferPool(1, block_size)

    def check(self, request: Request, direct: bool) -> None:
        """Compare one finished write; `direct` tells which way it went.

        Raises:
            OSError: the file holds other bytes (EIO), or cannot be read.
        """
        buffer = self._pool.buffers[0]
        done = 0
        while done < request.length:
            with buffer.view[done : request.length] as rest:
                moved = os.preadv(self._fds[direct], [rest], request.offset + done)
            if not moved:
                break
            done += moved
        same = _libc.memcmp(buffer.address, request.buffer.address, request.length) == 0
        if done < request.length or not same:
            raise OSError(
                errno.EIO,
                f"bytes {request.offset} to {request.offset + request.length} of the file are not "
                "what was written",
            )

    def close(self) -> None:
        """Free the descriptors and the memory. Idempotent."""
        self._files.close()
        self._pool.close()
