"""Lower priority of the calling thread: training goes first. Threads that it starts inherit it.

Linux keeps both priorities for each thread. To raise them again takes a privilege, so this is for
threads that end with their save.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import threading

__all__ = ["lower"]

_NICENESS = 10  # a ninth of the CPU time that a thread of the usual 0 gets beside it
_CALLS = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
_THREAD = 1  # IOPRIO_WHO_PROCESS: one thread, in spite of the name
_BEST_EFFORT, _LAST = 2, 7  # the class of usual programs, and its lowest level. `idle` may starve
_CLASS_SHIFT = 13


def lower() -> None:
    """Lower the CPU and I/O priority of the calling thread; where that cannot be, it stays."""
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        if os.getpriority(os.PRIO_PROCESS, thread) < _NICENESS:
            os.setpriority(os.PRIO_PROCESS, thread, _NICENESS)
    call = _CALLS.get(platform.machine())
    if call is not None:
        wanted = ctypes.c_long(_BEST_EFFORT << _CLASS_SHIFT | _LAST)
        arguments = ctypes.c_long(_THREAD), ctypes.c_long(thread), wanted
        ctypes.CDLL(None).syscall(ctypes.c_long(call), *arguments)
