"""The replaced file's space is freed behind the caller's back.

Freeing gigabytes takes seconds where the file system trims them on the device at once (`discard`),
and the new checkpoint is safe by then. The next save waits for it, so that it finds the space.
"""

from __future__ import annotations

import os

from fastserial.interrupts import Background, Descriptors

__all__ = ["LARGE", "free", "wait_until_free"]

LARGE = 64 * 1024 * 1024  # bytes; less is freed faster than a thread is started
_threads = Background()


def free(files: Descriptors) -> None:
    """Close a descriptor that is the last to hold a file; on a thread if the file is large."""
    try:
        large = files.newest >= 0 and os.fstat(files.newest).st_size >= LARGE
    except OSError:
        large = False
    if not large or not _threads.start(files.close):
        files.close()


def wait_until_free() -> None:
    """Wait for the files that this process replaced before."""
    if _threads:
        _threads.join()


def _forget() -> None:
    global _threads  # they are the parent's
    _threads = Background()


os.register_at_fork(after_in_child=_forget)
