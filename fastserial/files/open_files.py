"""Whether this process holds a file open, and would miss a new one that took its place.

`NamedTemporaryFile`, `mkstemp`, a lock (`flock`) on the checkpoint: what is saved under the name is
expected behind the descriptor. A descriptor of our own is not (`interrupts`), nor one that
another thread reads from at this moment: that reader is to see the old file to its end.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterable

from fastserial.interrupts import OWN

__all__ = ["is_held"]

_MOST_WITHOUT_PROC = 1024


def is_held(device: int, inode: int) -> bool:
    """Return whether a descriptor of this process should see what is saved to a file.

    That is one that is open for writing, or whose file is locked; one that is open for reading
    only if no other thread can be reading. Takes about two microseconds for each
    descriptor of the process.
    """
    is_read = False
    for fd in _descriptors():
        try:
            found = os.fstat(fd)
            if found.st_ino != inode or found.st_dev != device:
                continue
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        except OSError:  # closed in between
            continue
        if flags & (OWN | os.O_PATH):  # the latter cannot read
            continue
        if flags & os.O_ACCMODE != os.O_RDONLY:
            return True
        if _holds_lock(fd):
            return True
        is_read = True
    return is_read and _is_alone()


def _descriptors() -> Iterable[int]:
    try:
        return map(int, os.listdir("/proc/self/fd"))
    except OSError:  # no /proc, or no descriptor left to look into it
        return range(_MOST_WITHOUT_PROC)


def _is_alone() -> bool:
    """Return whether no other thread runs Python but ours."""
    others = [
        thread for thread in threading.enumerate() if thread is not threading.current_thread()
    ]
    return all(thread.name.startswith("fastserial") for thread in others)


def _holds_lock(fd: int) -> bool:
    """Return whether a lock (`flock`, `lockf`) was taken through a descriptor.

    Other locks on the file do not count: a save holds one on its new file.
    """
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="utf-8", errors="replace") as lines:
            return any(line.startswith("lock:") for line in lines)
    except OSError:
        return False
