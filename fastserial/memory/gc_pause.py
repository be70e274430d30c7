"""Python's cyclic garbage collector, held off while thousands of objects are made.

Each of them brings the next collection nearer, and a collection looks at all that live: with
20,000 tensors that took a third of the time. Reference counting goes on as usual.

A high threshold holds it off, not `gc.disable()`, which other code may call in between. The pause
lasts as long as a reference to it exists: no forgotten call makes it longer, and it needs no lock,
which a signal handler could find taken. Whoever makes a million objects meanwhile, or keeps the
error of an interrupted save in a cycle with its pause, gets a collection all the same.
"""

from __future__ import annotations

import gc
import operator
import os
import weakref
from collections.abc import Callable
from functools import partial

__all__ = ["paused_collection"]

_HIGH = 1_000_000  # objects


class _Pause:
    """Shared by all who want no collection now; sets the thresholds back when it goes."""

    restore: Callable[[], object] = gc.isenabled  # which does nothing

    # No handler runs before it is done: there is no function of Python's in it.
    __del__ = property(operator.attrgetter("restore"))


_current: weakref.ref[_Pause] | None = None  # the one that was begun last


class paused_collection:
    """Collect no cycles in the body; in any number of threads at once."""

    __slots__ = ("_pause",)

    def __init__(self) -> None:
        self._pause: _Pause | None = None

    def __enter__(self) -> paused_collection:
        self.begin()
        return self

    def begin(self) -> None:
        """Hold collections off until `end`."""
        try:
            self._begin()
        except BaseException:
            self._pause = None  # whoever keeps the error must not keep this
            raise

    def _begin(self) -> None:
        """Join the pause that is on, or begin one."""
        global _current
        self._pause = _current() if _current is not None else None
        if self._pause is None:
            first, *others = thresholds = gc.get_threshold()
            if 0 < first < _HIGH:
                self._pause = _Pause()
                self._pause.restore = partial(gc.set_threshold, *thresholds)
                gc.set_threshold(_HIGH, *others)
                _current = weakref.ref(self._pause)  # now others may join

    def __exit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Let others collect again. Idempotent."""
        if self._pause is not None and gc.get_threshold()[0] != _HIGH:
            self._pause.restore = gc.isenabled  # other code set others during the pause
        self._pause = None


def _forget() -> None:
    """Start over in a forked child: the threads that paused are not there."""
    pause = _current() if _current is not None else None
    if pause is not None:
        pause.restore()


os.register_at_fork(after_in_child=_forget)
