"""Spans: what which thread did from when to when, nested; and their form as a trace file."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Any, NamedTuple

__all__ = ["Recorder", "Span", "as_trace", "self_seconds"]

_MICRO = 1e6


class Span(NamedTuple):  # quick to make: thousands are made within a save
    """One stretch of one thread's time.

    Attributes:
        name: what was done.
        thread: its identifier.
        start, end: seconds on `time.perf_counter`.
        own: seconds of it that no span inside it covers.
    """

    name: str
    thread: int
    start: float
    end: float
    own: float

    @property
    def seconds(self) -> float:
        """From start to end."""
        return self.end - self.start


class Recorder:
    """Collects spans from any number of threads.

    Attributes:
        spans: in the order in which they ended.
        threads: names of the threads by identifier; one that ended may leave it to another.
        levels: values over time, such as blocks in flight: (seconds, value).
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.threads: dict[int, str] = {}
        self.levels: list[tuple[float, int]] = []
        self._open = threading.local()

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same, and records a span for each call."""

        @functools.wraps(function)
        def recorded(*args: Any, **keywords: Any) -> Any:
            return self.call(name, function, *args, **keywords)

        return recorded

    def call(self, name: str, function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """Call a function within a span, and return what it returns."""
        stack = self._stack()
        inside = [0.0]
        stack.append(inside)
        start = perf_counter()
        try:
            return function(*args, **keywords)
        finally:
            end = perf_counter()
            stack.pop()
            if stack:
                stack[-1][0] += end - start
            self.spans.append(
                Span(name, threading.get_ident(), start, end, end - start - inside[0])
            )

    def add(self, name: str, thread: int, start: float, end: float) -> None:
        """Enter a span without spans inside it, told by somebody else."""
        if thread not in self.threads:
            self.threads[thread] = _name_of(thread)
        self.spans.append(Span(name, thread, start, end, end - start))

    def _stack(self) -> list[list[float]]:
        stack: list[list[float]] | None = getattr(self._open, "stack", None)
        if stack is None:
            stack = self._open.stack = []
            self.threads[threading.get_ident()] = _name_of(threading.get_ident())
        return stack


def _name_of(thread: int) -> str:
    """Return a thread's name; fastserial's own have none."""
    names = {known.ident: known.name for known in threading.enumerate()}
    return names.get(thread, f"fastserial {thread}")


def self_seconds(spans: Iterable[Span]) -> dict[str, tuple[float, int]]:
    """Return own seconds and number of spans by name, in the order of their first start."""
    found: dict[str, tuple[float, int]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        seconds, count = found.get(span.name, (0.0, 0))
        found[span.name] = seconds + span.own, count + 1
    return found


def as_trace(recorder: Recorder, begin: float, level: str) -> dict[str, Any]:
    """Return the spans as Chrome trace events, which Perfetto and chrome://tracing open.

    Args:
        begin: seconds on `time.perf_counter` that become 0.
        level: what `recorder.levels` counts.
    """
    names = dict(recorder.threads)
    tracks = {ident: number for number, ident in enumerate(names, 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "torch.save"}}
    ]
    for ident, track in tracks.items():
        for kind, value in (("thread_name", names[ident]), ("thread_sort_index", track)):
            key = "name" if kind == "thread_name" else "sort_index"
            events.append({"ph": "M", "name": kind, "pid": 1, "tid": track, "args": {key: value}})
    for span in sorted(recorder.spans, key=lambda span: (span.start, -span.end)):
        event = {"ph": "X", "name": span.name, "cat": "save", "pid": 1, "tid": tracks[span.thread]}
        start = (span.start - begin) * _MICRO
        events.append({**event, "ts": round(start, 3), "dur": round(span.seconds * _MICRO, 3)})
    for when, value in recorder.levels:
        ts = round((when - begin) * _MICRO, 3)
        events.append(
            {"ph": "C", "name": level, "pid": 1, "tid": 0, "ts": ts, "args": {level: value}}
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
