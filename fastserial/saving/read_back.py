"""Reading blocks back from the device after writing them, to compare them with memory."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os

from fastserial.engines import Request
from fastserial.files import linux
from fastserial.files.linux import preadv
from fastserial.interrupts import Descriptors
from fastserial.memory.buffers import BufferPool

__all__ = ["ReadBack"]

_libc = ctypes.CDLL(None)
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class ReadBack:
    """Compares written blocks of one file with what the file holds.

    Reads past the page cache where blocks were written so. A block that went through the cache is
    read from it, which proves less.
    """

    def __init__(self, fd: int, direct: bool, block_size: int) -> None:
        """Reopen the file behind `fd` for reading; `direct`: also past the page cache.

        Where that is refused (the mode of the file, a limit on descriptors), it is read through
        `fd`, if that can read: blocks that were written past the page cache are not in it, and
        come from the device all the same.

        Raises:
            OSError: the file may not be read.
        """
        self._files = Descriptors()
        self._fds = {False: fd, True: fd}
        try:
            self._fds[False] = self._fds[True] = linux.reopen(fd, os.O_RDONLY, self._files)
            if direct:
                flags = os.O_RDONLY | os.O_DIRECT
                self._fds[True] = linux.reopen(fd, flags, self._files)
        except OSError:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
                raise
        self._pool = BufferPool(1, block_size)

    def check(self, request: Request, direct: bool) -> None:
        """Compare one finished write; `direct` says which way it went.

        Raises:
            OSError: the file holds other bytes (EIO), or cannot be read.
        """
        buffer = self._pool.buffers[0]
        fd = self._fds[direct]
        done = 0
        while done < request.length:
            with buffer.view[done : request.length] as rest:
                moved = preadv(fd, [rest], request.offset + done)
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
