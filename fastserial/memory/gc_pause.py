"""Python's cyclic garbage collector, held off while thousands of objects are made.

Each of them brings the next collection nearer, and a collection looks at all that live: with
20,000 tensors that took a third of the time. Reference counting goes on as usual.

A high threshold holds it off, not `gc.disable()`, which other code may call in between. Whoever
makes a million objects meanwhile, or keeps the error of an interrupted save in a cycle with its
pause, gets a collection all the same.
"""

from __future__ import annotations

import gc

from fastserial.memory.held_setting import HeldSetting, Hold

__all__ = ["paused_collection"]

_HIGH = 1_000_000  # objects


def paused_collection() -> Hold:
    """Return what lets nobody collect cycles in the body of a `with`."""
    return _THRESHOLDS.hold()


def _high(first: int, *others: int) -> tuple[int, ...] | None:
    return (_HIGH, *others) if 0 < first < _HIGH else None


def _is_high(first: int, *others: int) -> bool:
    return first == _HIGH


_THRESHOLDS = HeldSetting(gc.get_threshold, gc.set_threshold, _high, _is_high)
