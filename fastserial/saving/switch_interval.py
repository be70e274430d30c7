"""How long a thread may compute in Python while another one waits for the interpreter's lock.

5 ms, unless a program sets it (`sys.setswitchinterval`). A save beside a thread that never waits
for anything has to wait that long after each step that lets go of the lock.
"""

from __future__ import annotations

import sys

from fastserial.config.performance import SWITCH_INTERVAL
from fastserial.memory.held_setting import HeldSetting, Hold

__all__ = ["quick_switches"]

_ROUND = 0.5e-6  # seconds. Python drops parts of microseconds: so much more, and it sets the same


def quick_switches() -> Hold:
    """Return what lets threads take turns more often in the body of a `with`."""
    return _INTERVAL.hold()


def _get() -> tuple[float]:
    return (sys.getswitchinterval() + _ROUND,)


def _shorter(interval: float) -> tuple[float] | None:
    return (SWITCH_INTERVAL,) if interval > SWITCH_INTERVAL + 2 * _ROUND else None


def _is_short(interval: float) -> bool:
    return abs(interval - SWITCH_INTERVAL) < 2 * _ROUND


_INTERVAL = HeldSetting(_get, sys.setswitchinterval, _shorter, _is_short)
