"""Free memory that is there, before something is timed that takes some."""

from __future__ import annotations

import mmap

from fastserial.files.meminfo import available_bytes

__all__ = ["fetch_free_memory"]

_MADV_POPULATE_WRITE = 23  # Linux 5.14


def fetch_free_memory(nbytes: int) -> None:
    """Take as much memory, at most half of what is available, and free it again.

    A virtual machine gives free memory back to its host, and getting it again costs more than a
    load; which row would pay for that is chance. Small pages come from other places than huge
    ones, so both are asked for.
    """
    available = available_bytes()
    nbytes = nbytes if available is None else min(nbytes, available // 2)
    if not nbytes:
        return
    for advice in (mmap.MADV_NORMAL, mmap.MADV_HUGEPAGE):
        with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            try:
                memory.madvise(advice)
                memory.madvise(_MADV_POPULATE_WRITE)
            except OSError:  # an older kernel, or one without huge pages
                for start in range(0, nbytes, mmap.PAGESIZE):
                    memory[start] = 1
