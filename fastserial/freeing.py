"""The replaced file's space is freed behind the caller's back.

Freeing gigabytes takes seconds where the file system trims them on the device at once (`discard`),
and the new checkpoint is safe by then. The next save waits for it, so that it finds the space.
"""

from __future__ import annotations

import contextlib
import os
import threading

__all__ = ["LARGE", "free", "wait_until_free"]

LARGE = 64 * 1024 * 1024  # bytes; less is freed faster than a thread is started
_lock = threading.RLock()  # a signal handler may save while its thread holds this
_threads: list[threading.Thread] = []


def free(fd: int) -> None:
    """Close a descriptor that is the last to hold a file; on a thread if the file is large."""
    try:
        large = os.fstat(fd).st_size >= LARGE
    except OSError:
        large = False
    if large:
        thread = threading.Thread(target=_close, args=(fd,), name="fastserial-free")
        with contextlib.suppress(RuntimeError), _lock:  # no thread to be had
            thread.start()
            _threads.append(thread)
            return
    _close(fd)


def _close(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.close(fd)


def wait_until_free() -> None:
    """Wait for the files that this process replaced before."""
    if not _threads:
        return
    with _lock:
        threads = _threads.copy()
        _threads.clear()
    for thread in threads:
        thread.join()


def _forget() -> None:
    global _lock  # another thread may have held it
    _lock = threading.RLock()
    _threads.clear()


os.register_at_fork(after_in_child=_forget)
