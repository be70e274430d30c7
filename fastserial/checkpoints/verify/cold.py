"""Taking a checkpoint out of the page cache, so that what is verified is what the device holds."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from fastserial.files.caching import cached_fraction
from fastserial.files.linux import synced
from fastserial.interrupts import Descriptors

__all__ = ["evict"]

_STAYS = 0.01  # of a file: a page or two that another process reads meanwhile does not matter


def evict(path: str) -> str | None:
    """Write a file, or the files in a folder, to the device, and drop them from the page cache.

    Nothing of them changes. Other programs read them from the device again.

    Returns:
        Why not all of it is gone, None if it is.

    Raises:
        OSError: a file cannot be opened, or its device failed.
    """
    for name in _files(path):
        with Descriptors() as files:
            fd = files.open(name, os.O_RDONLY | os.O_NONBLOCK)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                continue
            synced(fd)  # what is not on the device yet cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            if (cached_fraction(fd, 0, os.fstat(fd).st_size) or 0.0) > _STAYS:
                return (
                    f"{name} stays in the page cache, so not all was read from the device: a "
                    "program has it mapped, or its file system is in memory"
                )
    return None


def _files(path: str) -> Iterator[str]:
    if not os.path.isdir(path):
        yield path
    for folder, _, names in os.walk(path):
        yield from (os.path.join(folder, name) for name in names)
