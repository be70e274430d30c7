"""Settings of the interpreter, changed as long as anybody wants them so.

The change lasts as long as a reference to it exists: no forgotten call makes it longer, and it
needs no lock, which a signal handler could find taken. Who sets another value meanwhile keeps that.
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

__all__ = ["HeldSetting", "Hold", "paused_collection", "quick_switches"]


class _Change:
    """Shared by all who want it; sets the value back when it goes."""

    restore: Callable[[], object] = bool  # which does nothing
    value: Any = None  # the first number of the setting, as it was changed

    # No handler runs before it is done: there is no function of Python's in it.
    __del__ = property(operator.attrgetter("restore"))


class HeldSetting:
    """One setting, and the value that some want it to have for a time."""

    def __init__(
        self,
        get: Callable[[], tuple[Any, ...]],
        put: Callable[..., object],
        wanted: Callable[..., tuple[Any, ...] | None],
    ) -> None:
        """Describe a setting.

        Args:
            get: returns its value, some numbers; who changes the first one meanwhile keeps it.
            put: sets it; called with what `get` returned. A function of C.
            wanted: called with the value that it has, returns the one it is to have, or None
                where it is to stay, as that one is.
        """
        self._get = get
        self._put = put
        self._wanted = wanted
        self._current: weakref.ref[_Change] | None = None  # the one that was begun last
        os.register_at_fork(after_in_child=self._start_over)

    def hold(self) -> Hold:
        """Return what changes the setting in the body of a `with`; in any number of threads."""
        return Hold(self)

    # No local refers to a change: an error that a program keeps would keep it.

    def _join(self, hold: Hold) -> None:
        """Join the change that is on, or begin one."""
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
            hold._change.restore = bool  # other code has set another value

    def _start_over(self) -> None:
        """Forget, in a forked child, the threads that wanted it: they are not there."""
        change = self._current() if self._current is not None else None
        if change is not None:
            if self._get()[0] == change.value:
                change.restore()
            change.restore = bool
        self._current = None


class Hold:
    """One who wants a setting changed."""

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
            self._change = None  # whoever keeps the error must not keep this
            raise

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Want it no more. Idempotent."""
        try:
            self._setting._leave(self)
        finally:
            self._change = None


_HIGH = 1_000_000  # objects


def paused_collection() -> Hold:
    """Return what lets nobody collect cycles in the body of a `with`.

    Each of thousands of new objects brings the next collection nearer, and a collection looks at
    all that live: with 20,000 tensors that took a third of the time. Reference counting goes on.

    A high threshold holds it off, not `gc.disable()`, which other code may call in between. Whoever
    makes a million objects meanwhile, or keeps the error of an interrupted save in a cycle with its
    pause, gets a collection all the same.
    """
    return _THRESHOLDS.hold()


def _high(first: int, *others: int) -> tuple[int, ...] | None:
    return (_HIGH, *others) if 0 < first < _HIGH else None


_THRESHOLDS = HeldSetting(gc.get_threshold, gc.set_threshold, _high)


_ROUND = 0.5e-6  # seconds. Python drops parts of microseconds: so much more, and it sets the same


def quick_switches() -> Hold:
    """Return what lets threads take turns more often in the body of a `with`.

    A thread that computes in Python keeps the interpreter's lock for 5 ms, unless a program sets
    another time (`sys.setswitchinterval`). A save beside one that never waits for anything has to
    wait that long after each step that lets go of the lock.
    """
    return _INTERVAL.hold()


def _get() -> tuple[float]:
    return (sys.getswitchinterval() + _ROUND,)


def _shorter(interval: float) -> tuple[float] | None:
    return (SWITCH_INTERVAL,) if interval > SWITCH_INTERVAL + 2 * _ROUND else None


_INTERVAL = HeldSetting(_get, sys.setswitchinterval, _shorter)
