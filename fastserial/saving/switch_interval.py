"""How long a thread may compute in Python while another one waits for the interpreter's lock.

5 ms, unless a program sets it (`sys.setswitchinterval`). A save beside a thread that never waits
for anything has to wait that long after each step that lets go of the lock.
"""

from __future__ import annotations

import sys

from fastserial.config.performance import SWITCH_INTERVAL
from fastserial.memory.held_setting import HeldSetting, Hold

__all__ = ["quick_switches"]


def quick_switches() -> Hold:
    """Return what lets threads take turns more often in the body of a `with`."""
    return _INTERVAL.hold()


def _get() -> tuple[float]:
    """Return the interval, so that setting it sets the same: Python drops parts of microseconds."""
    return (sys.getswitchinterval() + 0.5e-6,)


def _shorter(interval: float) -> tuple[float] | None:
    return (SWITCH_INTERVAL,) if interval > SWITCH_INTERVAL else None


_INTERVAL = HeldSetting(_get, sys.setswitchinterval, _shorter)
