"""Between two runs: no dirty pages are left that would slow down the next run."""

from __future__ import annotations

import os
import time

from fastserial.files.meminfo import meminfo
from fastserial.files.replacement import wait_until_free

__all__ = ["settle"]

_QUIET = 4 << 20  # bytes
_PATIENCE = 5.0  # seconds; other processes may go on writing
_POLL = 0.02


def settle(pause: float) -> None:
    """Write all dirty pages back, wait until that is done, and `pause` seconds more.

    Replaced files are freed, too: that would slow down the next run.
    """
    wait_until_free()
    os.sync()
    until = time.monotonic() + _PATIENCE
    while _dirty() > _QUIET and time.monotonic() < until:
        time.sleep(_POLL)
    time.sleep(pause)


def _dirty() -> int:
    found = meminfo()
    return found.get("Dirty", 0) + found.get("Writeback", 0)
