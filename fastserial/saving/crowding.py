"""Finding out that another thread keeps the interpreter's lock, from how long blocks take to fill.

A thread that computes in Python gives the lock up when it was asked for 5 ms long
(`sys.getswitchinterval`). Each copy and each checksum lets go of it, and has to ask for it again.
So beside such a thread a save is as fast as its steps are few.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from resource import RUSAGE_THREAD, getrusage

from fastserial.config.performance import CROWDED_BLOCKS
from fastserial.formats.extents import Data, Hole, Literal
from fastserial.memory.held_settings import quick_switches
from fastserial.saving.fill import Block

__all__ = ["Crowding"]

_PROBES = 3
_SHORTEST = 1e-6  # seconds


class Crowding:
    """What is known of the lock, for the blocks of one file."""

    def __init__(self) -> None:
        self._found = False
        self._decided = False
        self._late: deque[float] = deque(maxlen=CROWDED_BLOCKS)
        self._quick = quick_switches()

    def saw(self, block: Block) -> None:
        """Note how long a full block took to fill."""
        if self._decided:
            return
        steps = max(1, block.length // block.chunk)
        late = block.fill_seconds - steps * sys.getswitchinterval() / 2
        if late > 0 and not all(isinstance(part.source, _PLAIN) for part in block.parts):
            return
        self._late.append(late)
        if len(self._late) == CROWDED_BLOCKS and sum(self._late) > 0:
            self._late.clear()
            self._found = all(_waits() for _ in range(_PROBES))  # else memory or a disk is slow

    def found(self) -> bool:
        """Return whether blocks are filled slowly because others have the lock. True once.

        From then on threads take turns more often, until `end`.
        """
        found, self._found = self._found, False
        if found:
            self._decided = True
            self._quick.begin()
        return found

    def end(self) -> None:
        """Let threads take turns as before. Idempotent."""
        self._quick.end()


_PLAIN = (Data, Hole, Literal)


def _waits() -> bool:
    """Let go of the lock; return whether it took long to get it back.

    A thread that waits for the lock sleeps once more than it asked to. One that waits for a
    processor only, among busy processes, does not. Where the kernel does not count that, nothing
    is found.
    """
    try:
        slept = getrusage(RUSAGE_THREAD).ru_nvcsw
        began = time.perf_counter()
        time.sleep(_SHORTEST)
        if time.perf_counter() - began <= sys.getswitchinterval() / 2:
            return False
        return getrusage(RUSAGE_THREAD).ru_nvcsw - slept > 1
    except (OSError, ValueError):  # a sandbox forbids it, or has no such counter
        return False
