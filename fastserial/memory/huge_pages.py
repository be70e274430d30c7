"""Huge pages for memory that direct I/O uses: the kernel pins it page by page.

Touching a huge page for the first time takes 0.2 to 0.5 ms, and 2 to 6 ms where a hypervisor took
the free memory back (free page reporting). Small pages, of which the kernel has some that were
never given back, take 1 to 2 ms for as many bytes. So pages are timed: a first load of 1 GB
took 0.24 to 0.73 s, with huge pages throughout 1.9 to 2.4 s, by stock torch 0.5 to 1.7 s (a busy
virtual machine). In memory that is not taken back, timing makes no difference (0.985 to 1.009 x).
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from pathlib import Path
from time import thread_time

from fastserial.config.performance import (
    HUGE_PAGE,
    SLOW_TOUCH,
    SLOW_TOUCHES,
    TIMED_STEP,
)
from fastserial.interrupts import ours

SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PR_GET_THP_DISABLE = 42
_MADV_COLLAPSE = 25  # Linux 6.1

_MADV_POPULATE_WRITE = 23  # Linux 5.14
_NEIGHBOURS = 2 * mmap.PAGESIZE  # apart at most: malloc maps large pieces of memory side by side

_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def gather_pages(address: int, nbytes: int) -> None:
    """Put resident memory on huge pages, where the kernel can and does.

    Direct writes from small pages were seen to take about twice as long.
    """
    _advise(address, nbytes, mmap.MADV_HUGEPAGE, _MADV_COLLAPSE)


class HugePages:
    """Requests huge pages for new memory, until they turn out to be slow."""

    def __init__(self) -> None:
        self._slow = 0
        self._untimed = TIMED_STEP  # bytes since the last timed page

    @property
    def are_slow(self) -> bool:
        """Whether small pages are used instead."""
        return self._slow >= SLOW_TOUCHES

    def advise(self, address: int, nbytes: int) -> None:
        """Request huge pages for memory, except for its unaligned ends.

        Direct reads to small pages were seen to take about one and a half times as long.
        """
        first = -(-address // HUGE_PAGE) * HUGE_PAGE
        stop = (address + nbytes) // HUGE_PAGE * HUGE_PAGE
        for start in range(first, stop, TIMED_STEP):
            if self._untimed >= TIMED_STEP and not self.are_slow:
                _advise(start, HUGE_PAGE, mmap.MADV_HUGEPAGE)
                self._time(start, mmap.PAGESIZE, _MADV_POPULATE_WRITE)
                self._untimed = 0
            if self.are_slow:
                return
            length = min(stop - start, TIMED_STEP)
            _advise(start, length, mmap.MADV_HUGEPAGE)
            self._untimed += length

    def advise_all(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Request huge pages for memory of malloc's: (address, bytes), neighbours count as one.

        malloc has touched the edges, which makes the kernel map small pages beside them. 96 MB in
        pieces of 300 KB were read in 21 ms with the edges put on huge pages first, else in 57.
        A neighbour shares the page at an end of a run: another unit, or memory not touched yet.
        """
        run: list[tuple[int, int]] = []
        for address, nbytes in sorted(ranges):
            if run and address - sum(run[-1]) > _NEIGHBOURS:
                self._advise_run(run)
                run = []
            run.append((address, nbytes))
        if run:
            self._advise_run(run)

    def _advise_run(self, run: Sequence[tuple[int, int]]) -> None:
        first, stop = run[0][0], sum(run[-1])
        self.advise(first, stop - first)
        done = -1
        for address, nbytes in run:
            for edge in (address - 1, address + nbytes):
                page = edge - edge % HUGE_PAGE
                if done < page and not self.are_slow:
                    self._time(page, HUGE_PAGE, _MADV_COLLAPSE)
                    done = page

    def _time(self, address: int, nbytes: int, advice: int) -> None:
        began = thread_time()  # to wait for the interpreter's lock does not count
        _madvise(address, nbytes, advice)
        self._slow += thread_time() - began > SLOW_TOUCH


def refused() -> str | None:
    """Return who keeps huge pages from this process, or None if it gets what it asks for."""
    if ctypes.CDLL(None).prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) == 1:
        return "they are switched off for this process (PR_SET_THP_DISABLE)"
    try:
        setting = SWITCH.read_text()
    except ours(OSError):
        return "this kernel has no transparent huge pages"
    return f"{SWITCH} says never" if "[never]" in setting else None


def _advise(address: int, nbytes: int, *advices: int) -> None:
    start = -(-address // HUGE_PAGE) * HUGE_PAGE
    length = (address + nbytes) // HUGE_PAGE * HUGE_PAGE - start
    if length > 0:
        for advice in advices:  # a refusal does no harm
            _madvise(start, length, advice)
