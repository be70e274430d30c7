"""Whether an open file is still the one it was: size and inode, and its ends where times differ.

A time of modification alone proves nothing: keepers of scratch folders touch files, and some FUSE
file systems tell the time of the question. A checkpoint that was written over differs in its first
or last bytes: a zip's end holds the CRC-32 of an id made from all of its records' CRCs.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple

__all__ = ["FileStamp", "stamp"]

_END_BYTES = 4096


class FileStamp(NamedTuple):
    """What a file was like: device and inode, bytes, time (ns), its first and last bytes.

    `ends` is empty where nothing but the size is to be compared.
    """

    place: tuple[int, int]
    size: int
    modified: int
    ends: tuple[bytes, ...] = ()

    def holds_for(self, fd: int) -> bool:
        """Tell whether a file has not changed since, as far as is known."""
        found = os.fstat(fd)
        if ((found.st_dev, found.st_ino), found.st_size) != (self.place, self.size):
            return False
        if found.st_mtime_ns == self.modified or not self.ends:
            return True
        try:
            return _ends(fd, self.size) == self.ends
        except OSError:  # a bad disk is no proof of a change
            return True


def stamp(fd: int, found: os.stat_result | None = None, ends: bool = True) -> FileStamp:
    """Return what an open file is like now.

    Args:
        fd: its descriptor; positions are not used.
        found: its status, if it is known.
        ends: read its first and last bytes, too, if it is a regular file.

    Raises:
        OSError: it cannot be read.
    """
    found = found or os.fstat(fd)
    size = found.st_size
    parts = _ends(fd, size) if ends and stat.S_ISREG(found.st_mode) else ()
    return FileStamp((found.st_dev, found.st_ino), size, found.st_mtime_ns, parts)


def _ends(fd: int, size: int) -> tuple[bytes, ...]:
    return os.pread(fd, _END_BYTES, 0), os.pread(fd, _END_BYTES, max(0, size - _END_BYTES))
