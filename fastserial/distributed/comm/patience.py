"""Calls a function after a while, from one thread for all of a process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from fastserial.interrupts import Locked, suppress

_wanted: dict[object, tuple[float, Callable[[], object]]] = {}
_lock = threading.RLock()
_new = threading.Event()
_wakes = 0.0  # when the thread looks again by itself
_process = -1  # the one that has the thread


def call_after(seconds: float, function: Callable[[], object]) -> Callable[[], None]:
    """Call a function after some seconds; call the result to have it not called."""
    global _process
    key, until = object(), time.monotonic() + seconds
    with Locked(_lock):
        _wanted[key] = until, function
        if _process != os.getpid():
            threading.Thread(target=_run, name="fastserial: patience", daemon=True).start()
            _process = os.getpid()
        if until < _wakes:
            _new.set()
    return lambda: _drop(key)


def _drop(key: object) -> None:
    with Locked(_lock):
        _wanted.pop(key, None)


def _run() -> None:
    global _wakes
    while True:
        with Locked(_lock):
            _new.clear()
            now = time.monotonic()
            due = [key for key, (until, _) in _wanted.items() if until <= now]
            calls = [_wanted.pop(key)[1] for key in due]
            _wakes = min((until for until, _ in _wanted.values()), default=float("inf"))
        for call in calls:
            with suppress(Exception):  # the thread is everybody's
                call()
        _new.wait(min(threading.TIMEOUT_MAX, max(0.0, _wakes - time.monotonic())))


def _in_child() -> None:
    """Begin anew: the thread is the parent's, which may hold the lock, and so is what it says."""
    global _lock, _new, _process
    _lock, _new, _process = threading.RLock(), threading.Event(), -1
    _wanted.clear()


os.register_at_fork(after_in_child=_in_child)
