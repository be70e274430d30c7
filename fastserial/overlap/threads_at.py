"""Whether a thread has left the torch operation that it was in.

torch counts a change of a tensor when the operation that makes it ends, and drops the
interpreter's lock while it runs. So the counters say nothing about an operation that is running.
Whoever has read bytes waits until the training threads have run some Python, and compares then.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from time import monotonic, sleep

_FIRST_PAUSE = 0.0002  # seconds
_LONGEST_PAUSE = 0.005
_resting: dict[int, int] = {}  # threads that wait in fastserial, and how deep


@contextlib.contextmanager
def at_rest() -> Iterator[None]:
    """Declare that the calling thread is in no torch operation during the body."""
    me = threading.get_ident()
    _resting[me] = _resting.get(me, 0) + 1
    try:
        yield
    finally:
        _resting[me] -= 1
        if not _resting[me]:
            del _resting[me]


def wait_until_on(threads: Mapping[int, int], patience: float) -> None:
    """Return when each of the threads has executed Python code since the call.

    Args:
        threads: kernel identifiers by Python's; threads that have ended, rest (`at_rest`), or call
            this do not count.
        patience: seconds; a thread that has not run for so long is waiting for something else.
    """
    me = threading.get_ident()
    before = _positions([thread for thread in threads if thread != me])
    ran = {thread: (_activity(threads[thread]), monotonic()) for thread in before}
    pause = _FIRST_PAUSE
    while True:
        now, there = monotonic(), _positions(before)
        for thread, place in list(before.items()):
            activity = _activity(threads[thread])
            if activity != ran[thread][0]:
                ran[thread] = activity, now
            idle = now - ran[thread][1] > patience
            if there.get(thread) != place or thread in _resting or idle:
                del before[thread]
        if not before or _is_over(before):
            return
        sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _activity(thread: int) -> object:
    """Return what changes while a thread runs, or is ready to; None if it is unknown."""
    try:
        with open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as file:
            return file.read().split()[:2]
    except OSError:
        return None


def _positions(threads: Iterable[int]) -> dict[int, tuple[int, int]]:
    frames = sys._current_frames()
    found = ((thread, frames.get(thread)) for thread in threads)
    return {thread: (id(frame), frame.f_lasti) for thread, frame in found if frame is not None}


def _is_over(threads: Iterable[int]) -> bool:
    """Return whether only the main thread is waited for, and has ended."""
    main = threading.main_thread()
    return list(threads) == [main.ident] and not main.is_alive()
