"""Huge pages for memory that direct I/O uses: the kernel pins it page by page.

Touching a huge page for the first time takes 0.2 to 0.5 ms, and 2 to 6 ms where a hypervisor took
the free memory back (free page reporting). Small pages, of which the kernel has some that were
never given back, take 1 to 2 ms for as many bytes.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from time import perf_counter

from fastserial.config.performance import HUGE_PAGE, SLOW_TOUCH, SLOW_TOUCHES, TIMED_STEP

__all__ = ["PR_GET_THP_DISABLE", "SWITCH", "HugePages", "gather_pages", "refused"]

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PR_GET_THP_DISABLE = 42
_MADV_COLLAPSE = 25  # Linux 6.1

# With the interpreter held: waiting for it would be timed, too.
_memset = ctypes.PyDLL(None).memset
_memset.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
_memset.restype = None


def gather_pages(address: int, nbytes: int) -> None:
    """Put resident memory on huge pages, where the kernel can and does.

    Direct writes from small pages were seen to take about twice as long.
    """
    _advise(address, nbytes, mmap.MADV_HUGEPAGE, _MADV_COLLAPSE)


class HugePages:
    """Lets new memory come on huge pages, until they turn out to be slow."""

    def __init__(self) -> None:
        self._slow = 0

    @property
    def are_slow(self) -> bool:
        """Whether small pages are used instead."""
        return self._slow >= SLOW_TOUCHES

    def advise(self, address: int, nbytes: int) -> None:
        """Let memory whose bytes nobody needs come on huge pages, but for its unaligned ends.

        Direct reads to small pages were seen to take about one and a half times as long.
        """
        first = -(-address // HUGE_PAGE) * HUGE_PAGE
        stop = (address + nbytes) // HUGE_PAGE * HUGE_PAGE
        for start in range(first, stop, TIMED_STEP):
            if self.are_slow:
                return
            _advise(start, min(stop - start, TIMED_STEP), mmap.MADV_HUGEPAGE)
            began = perf_counter()
            _memset(start, 0, 1)
            self._slow += perf_counter() - began > SLOW_TOUCH


def refused() -> str | None:
    """Return who keeps huge pages from this process, or None if it gets what it asks for."""
    if ctypes.CDLL(None).prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) == 1:
        return "they are switched off for this process (PR_SET_THP_DISABLE)"
    try:
        setting = SWITCH.read_text()
    except OSError:
        return "this kernel has no transparent huge pages"
    return f"{SWITCH} says never" if "[never]" in setting else None


def _advise(address: int, nbytes: int, *advices: int) -> None:
    start = -(-address // HUGE_PAGE) * HUGE_PAGE
    length = (address + nbytes) // HUGE_PAGE * HUGE_PAGE - start
    if length > 0:
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for advice in advices:  # a refusal does no harm
            madvise(start, length, advice)
