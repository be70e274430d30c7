"""Settings of the interpreter that are changed while at least one holder needs the change.

A change lasts as long as a reference to it exists: a forgotten call cannot prolong it, and it needs
no lock, which a signal handler could find taken. If other code sets a value in between, that stays.
"""

from __future__ import annotations

import gc
import operator
import os
import sys
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from fastserial.config.performance import SWITCH_INTERVAL


class _Change:
    """Shared by all holders; restores the value when the last reference is gone."""

    restore: Callable[[], object] = bool  # which does nothing
    value: Any = None  # the first number of the setting, as it was changed

    # No handler runs before it is done: there is no function of Python's in it.
    __del__ = property(operator.attrgetter("restore"))


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
            put: sets it; called with what `get` returned. A function of C.
            wanted: called with the current value, returns the value to set, or None to leave it.
        """
        self._get = get
        self._put = put
        self._wanted = wanted
        self._current: weakref.ref[_Change] | None = None  # the latest
        os.register_at_fork(after_in_child=self._start_over)

    def hold(self) -> Hold:
        """Return a context manager that changes the setting; for any number of threads."""
        return Hold(self)

    # No local variable refers to a change: a stored exception would keep it.

    def _join(self, hold: Hold) -> None:
        """Join the current change, or begin one."""
        hold._change = self._current() if self._current is not None else None
        if hold._change is None:
            value = self._get()
            wanted = self._wanted(*value)
            if wanted is not None:
                hold._change = _Change()
                hold._change.restore = partial(self._put, *value)
                self._put(*wanted)
                hold._change.value = self._get()[0]
                self._current = weakref.ref(hold._change)  # now others may join

    def _leave(self, hold: Hold) -> None:
        if hold._change is not None and self._get()[0] != hold._change.value:
            hold._change.restore = bool  # other code has set a value

    def _start_over(self) -> None:
        """Forget the holders in a forked child: their threads do not exist there."""
        change = self._current() if self._current is not None else None
        if change is not None:
            if self._get()[0] == change.value:
                change.restore()
            change.restore = bool
        self._current = None


class Hold:
    """A holder of a changed setting."""

    __slots__ = ("_change", "_setting")

    def __init__(self, setting: HeldSetting) -> None:
        self._setting = setting
        self._change: _Change | None = None

    def __enter__(self) -> Hold:
        self.begin()
        return self

    def begin(self) -> None:
        """Change the setting until `end`."""
        try:
            self._setting._join(self)
        except BaseException:
            self._change = None  # a stored exception must not keep the change
            raise

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Release the setting. Idempotent."""
        try:
            self._setting._leave(self)
        finally:
            self._change = None


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
