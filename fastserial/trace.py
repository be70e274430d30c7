"""Trace events: the steps of saves and loads; by default nothing receives them.

    with trace.listen(lambda event: print(event.name, event.end - event.start)):
        torch.save(state, path)

`benchmarks/phases.py` makes its tables from them.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import NamedTuple, ParamSpec, TypeVar

__all__ = ["IN_FLIGHT", "Event", "Listener", "block", "emit", "listen", "step", "traced"]

IN_FLIGHT = "block in flight"
_P = ParamSpec("_P")
_R = TypeVar("_R")
_log = logging.getLogger("fastserial")


class Event(NamedTuple):
    """A step that has ended. Steps of one thread are nested or consecutive, never overlapping.

    Attributes:
        name: of the step.
        thread: identifier of the thread it kept busy; 0: none (`IN_FLIGHT`).
        start, end: seconds on `time.perf_counter`.
    """

    name: str
    thread: int
    start: float
    end: float


Listener = Callable[[Event], None]
listener: Listener | None = None  # checked before any event is made


@contextmanager
def listen(new: Listener) -> Iterator[None]:
    """Call `new` at the end of each step of all saves and loads of this process, in this block.

        with trace.listen(lambda event: print(event.name, event.end - event.start)):
            torch.save(state, path)

    It is called on the thread that made or reported the step, so possibly on several threads at
    once.
    """
    global listener
    before, listener = listener, new
    try:
        yield
    finally:
        listener = before


def step(name: str) -> AbstractContextManager[None]:
    """Return a context manager that makes its body a step."""
    return _NOTHING if listener is None else _step(name)


def traced(name: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator that makes each call of a function a step."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*args: _P.args, **keywords: _P.kwargs) -> _R:
            if listener is None:  # a context that does nothing takes 0.3 microseconds
                return function(*args, **keywords)
            with _step(name):
                return function(*args, **keywords)

        return call

    return decorate


def emit(name: str, start: float, end: float, thread: int | None = None) -> None:
    """Report a step that was timed elsewhere; by default one of this thread."""
    receive = listener
    if receive is None:
        return
    try:
        receive(Event(name, threading.get_ident() if thread is None else thread, start, end))
    except Exception:  # a listener must not fail a save
        _log.exception("a listener to trace events failed at %r", name)


def block(times: Sequence[float]) -> None:
    """Report a block's transfer: `times` as in `fastserial.engines.Request`."""
    queued, _, done = times
    emit(IN_FLIGHT, queued, done, 0)


_NOTHING = nullcontext()


@contextmanager
def _step(name: str) -> Iterator[None]:
    start = perf_counter()
    try:
        yield
    finally:
        emit(name, start, perf_counter())
