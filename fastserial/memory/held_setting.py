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
    ) -> None:
        """Describe a setting.

        Args:
            get: returns its value.
            put: sets it; called with what `get` returned. A function of C.
            wanted: called with the value that it has, returns the one it is to have, or None
                where it is to stay.
        """
        self._get = get
        self._put = put
        self._wanted = wanted
        self._value: tuple[Any, ...] = ()  # that the change has set
        self._current: weakref.ref[_Change] | None = None  # the one that was begun last
        os.register_at_fork(after_in_child=self._forget)

    def hold(self) -> Hold:
        """Return what changes the setting in the body of a `with`; in any number of threads."""
        return Hold(self)

    def _join(self) -> _Change | None:
        """Join the change that is on, or begin one."""
        change = self._current() if self._current is not None else None
        if change is None:
            value = self._get()
            wanted = self._wanted(*value)
            if wanted is not None:
                change = _Change()
                change.restore = partial(self._put, *value)
                self._put(*wanted)
                self._value = self._get()
                self._current = weakref.ref(change)  # now others may join
        return change

    def _leave(self, change: _Change) -> None:
        if self._get() != self._value:
            change.restore = bool  # other code set another value

    def _forget(self) -> None:
        """Start over in a forked child: the threads that wanted it are not there."""
        change = self._current() if self._current is not None else None
        if change is not None:
            change.restore()


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
            self._change = self._setting._join()
        except BaseException:
            self._change = None  # whoever keeps the error must not keep this
            raise

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Want it no more. Idempotent."""
        if self._change is not None:
            self._setting._leave(self._change)
        self._change = None
