"""Settings of the interpreter that are changed for a time: the collector, the switch interval.

Whoever finds a setting unchanged changes it and restores it, also if the end is skipped. Others
meanwhile leave it alone: it may be restored before they end, which costs them time only. So no lock
is needed, which a signal handler could find taken. If other code sets a value in between, that
stays.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

from fastserial.config.performance import SWITCH_INTERVAL


class HeldSetting:
    """One setting, and the value that it has while it is held."""

    def __init__(
        self,
        get: Callable[[], tuple[Any, ...]],
        put: Callable[..., object],
        wanted: Callable[..., tuple[Any, ...] | None],
    ) -> None:
        """Describe a setting.

        Args:
            get: returns its value, some numbers; if other code changes the first, that stays.
            put: sets it; called with what `get` returned.
            wanted: called with the current value, returns the value to set, or None to leave it.
        """
        self._get = get
        self._put = put
        self._wanted = wanted
        self._change: list[tuple[Any, ...]] = []  # the value before, and the one it was changed to
        # in a forked child the threads that hold it do not exist
        os.register_at_fork(after_in_child=lambda: self._restore(self._change))

    def hold(self) -> Hold:
        """Return a context manager that changes the setting; for any number of threads."""
        return Hold(self)

    def _begin(self, change: list[tuple[Any, ...]]) -> None:
        before = self._get()
        wanted = self._wanted(*before)
        if wanted is not None:
            self._change = change
            change.append(before)
            self._put(*wanted)
            change.append(self._get())

    def _restore(self, change: list[tuple[Any, ...]]) -> None:
        """Undo a change, if it is the one that is in force.

        If none is, another thread changed the setting, and restored it, while this change began.
        """
        if change and (change is self._change or not self._change):
            if len(change) == 1 or change[1][0] == self._get()[0]:
                self._put(*change[0])
            self._change = []


class Hold:
    """A holder of a setting."""

    __slots__ = ("_change", "_setting")

    def __init__(self, setting: HeldSetting) -> None:
        self._setting = setting
        self._change: list[tuple[Any, ...]] = []

    def __enter__(self) -> Hold:
        self.begin()
        return self

    def begin(self) -> None:
        """Change the setting until `end`. Idempotent."""
        if not self._change:
            self._setting._begin(self._change)

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Restore the setting, if this changed it. Idempotent."""
        self._setting._restore(self._change)
        self._change = []

    __del__ = end


_HIGH = 1_000_000  # objects


def paused_collection() -> Hold:
    """Return a context manager that pauses the collection of cycles.

    Thousands of new objects trigger collections, and each collection visits all objects: with
    20,000 tensors that took a third of the time. Reference counting is not affected.

    The pause is a high threshold, not `gc.disable()`, which other code may call in between. A
    program that makes a million objects in between still gets a collection, and so does one that
    stores the exception of an interrupted save in a cycle with its pause.
    """
    return _THRESHOLDS.hold()


def _high(first: int, *others: int) -> tuple[int, ...] | None:
    return (_HIGH, *others) if 0 < first < _HIGH else None


_THRESHOLDS = HeldSetting(gc.get_threshold, gc.set_threshold, _high)


_ROUND = 0.5e-6  # seconds. Python drops parts of microseconds: so much more, and it sets the same


def quick_switches() -> Hold:
    """Return a context manager that makes threads switch more often.

    A thread that computes in Python keeps the interpreter's lock for 5 ms, unless a program sets
    another time (`sys.setswitchinterval`). While one thread only computes, a save has to wait
    that long after each step that releases the lock.
    """
    return _INTERVAL.hold()


def _get() -> tuple[float]:
    return (sys.getswitchinterval() + _ROUND,)


def _shorter(interval: float) -> tuple[float] | None:
    return (SWITCH_INTERVAL,) if interval > SWITCH_INTERVAL + 2 * _ROUND else None


_INTERVAL = HeldSetting(_get, sys.setswitchinterval, _shorter)
