"""How much address space is left, where a limit is set (`ulimit -v`, RLIMIT_AS).

Without a limit a thread costs what it uses. With one it costs its whole stack, and the heap that
malloc reserves for each new thread: six threads took 600 MiB of a limit that stock torch kept.
"""

from __future__ import annotations

import mmap
import resource
from dataclasses import replace

from fastserial.config import Config

__all__ = ["REASON", "fitted", "is_enough"]

REASON = "little address space is left (ulimit -v)"
_HEAP = 64 * 1024 * 1024  # that malloc reserves for a thread, with glibc
_STACK = 8 * 1024 * 1024  # where the limit on stacks is none


def fitted(config: Config, needed: int = 0) -> Config:
    """Return options with as many threads and blocks as half of what is left has room for.

    At least one thread and one block remain, whether there is room or not.

    Args:
        config: the options in force.
        needed: bytes that the caller will take in addition.
    """
    room = _room(needed)
    if room is None:
        return config
    each = _thread_bytes()
    threads = min(config.threads, max(1, room // 2 // each))
    depth = min(config.queue_depth, max(1, (room - threads * each) // config.block_size))
    if (threads, depth) == (config.threads, config.queue_depth):
        return config
    return replace(config, threads=threads, queue_depth=depth)


def is_enough(config: Config, needed: int = 0, threads: int = 1) -> bool:
    """Return whether half of what is left has room for one block and that many threads."""
    room = _room(needed)
    return room is None or room >= config.block_size + threads * _thread_bytes()


def _room(needed: int) -> int | None:
    """Return half of the bytes left beyond those needed, None where there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        with open("/proc/self/statm", "rb") as file:
            taken = int(file.read().split()[0]) * mmap.PAGESIZE
    except OSError:  # no /proc, or no descriptor free
        return None
    return max(0, limit - taken - needed) // 2


def _thread_bytes() -> int:
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return _HEAP + (_STACK if stack == resource.RLIM_INFINITY else stack)
