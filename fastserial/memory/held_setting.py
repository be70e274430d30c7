"""A setting of the interpreter, changed as long as anybody wants it so.

The change lasts as long as a reference to it exists: no forgotten call makes it longer, and it
needs no lock, which a signal handler could find taken. Who sets another value meanwhile keeps that.
"""

from __future__ import annotations

import operator
import os
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["HeldSetting", "Hold"]


class _Change:
    """Shared by all who want it; sets the value back when it goes."""

    restore: Callable[[], object] = bool  # which does nothing

    # No handler runs before it is done: there is no function of Python's in it.
    __del__ = property(operator.attrgetter("restore"))


class HeldSetting:
    """One setting, and the value that some want it to have for a time."""

    def __init__(
        self,
        get: Callable[[], tuple[Any, ...]],
        put: Callable[..., object],
        wanted: Callable[..., tuple[Any, ...] | None],
        is_wanted: Callable[..., bool],
    ) -> None:
        """Describe a setting.

        Args:
            get: returns its value.
            put: sets it; called with what `get` returned. A function of C.
            wanted: called with the value that it has, returns the one it is to have, or None
                where it is to stay.
            is_wanted: called with the value that it has, returns whether `wanted` made that. Of
                such a one `wanted` returns None.
        """
        self._get = get
        self._put = put
        self._wanted = wanted
        self._is_wanted = is_wanted
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
                self._current = weakref.ref(hold._change)  # now others may join

    def _leave(self, hold: Hold) -> None:
        if hold._change is not None and not self._is_wanted(*self._get()):
            hold._change.restore = bool  # other code has set another value

    def _start_over(self) -> None:
        """Forget, in a forked child, the threads that wanted it: they are not there."""
        change = self._current() if self._current is not None else None
        if change is not None:
            if self._is_wanted(*self._get()):
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
