"""Whether a thread has come out of the operation that it was in.

torch counts a change of a tensor when the operation that makes it ends, and drops the
interpreter's lock while it runs. So a look at the counters tells nothing about an operation that
is under way: who has read bytes waits until the threads that train have gone on, and looks then.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator
from time import monotonic, sleep

__all__ = ["at_rest", "wait_until_on"]

_FIRST_PAUSE = 0.0002  # seconds
_LONGEST_PAUSE = 0.005
_resting: dict[int, int] = {}  # threads that wait in fastserial, and how deep


@contextlib.contextmanager
def at_rest() -> Iterator[None]:
    """Say that the calling thread is in no operation of torch's during the body."""
    me = threading.get_ident()
    _resting[me] = _resting.get(me, 0) + 1
    try:
        yield
    finally:
        _resting[me] -= 1
        if not _resting[me]:
            del _resting[me]


def wait_until_on(threads: Iterable[int], limit: float) -> None:
    """Return when each of the threads has executed something of Python's since the call.

    Args:
        threads: their identifiers; those that have ended, wait here, or call this do not count.
        limit: seconds after which a thread is taken to wait for something else.
    """
    me = threading.get_ident()
    before = _positions([thread for thread in threads if thread != me])
    pause, end = _FIRST_PAUSE, monotonic() + limit
    while True:
        now = _positions(before)
        before = {
            thread: place
            for thread, place in before.items()
            if now.get(thread) == place and thread not in _resting
        }
        if not before or monotonic() > end or _is_over(before):
            return
        sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _positions(threads: Iterable[int]) -> dict[int, tuple[int, int]]:
    frames = sys._current_frames()
    found = ((thread, frames.get(thread)) for thread in threads)
    return {thread: (id(frame), frame.f_lasti) for thread, frame in found if frame is not None}


def _is_over(threads: Iterable[int]) -> bool:
    """Return whether the main thread is all that is waited for, and has come to its end."""
    main = threading.main_thread()
    return list(threads) == [main.ident] and not main.is_alive()
