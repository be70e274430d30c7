"""Spans: trace events with the time that no event inside them covers; and as a trace file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from fastserial.trace import IN_FLIGHT, Event

__all__ = ["Span", "as_trace", "self_seconds", "spans_of"]

_MICRO = 1e6
_LEVEL = "blocks in flight"


class Span(NamedTuple):
    """A trace event, and `own`: the seconds of it that no event inside it covers."""

    event: Event
    own: float

    @property
    def seconds(self) -> float:
        """From start to end."""
        return self.event.end - self.event.start


def spans_of(events: Iterable[Event]) -> list[Span]:
    """Return the spans of all threads, thread by thread in the order of their starts."""
    spans: list[Span] = []
    around: list[int] = []  # places in `spans` of those that contain the present one
    busy = [event for event in events if event.thread]
    for event in sorted(busy, key=lambda event: (event.thread, event.start, -event.end)):
        while around and not _contains(spans[around[-1]].event, event):
            around.pop()
        if around:
            outer = spans[around[-1]]
            spans[around[-1]] = outer._replace(own=outer.own - (event.end - event.start))
        around.append(len(spans))
        spans.append(Span(event, event.end - event.start))
    return spans


def _contains(outer: Event, event: Event) -> bool:
    return outer.thread == event.thread and event.end <= outer.end


def self_seconds(spans: Iterable[Span]) -> dict[str, tuple[float, int]]:
    """Return own seconds and number of spans by name, in the order of their first start."""
    found: dict[str, tuple[float, int]] = {}
    for span in sorted(spans, key=lambda span: span.event.start):
        seconds, count = found.get(span.event.name, (0.0, 0))
        found[span.event.name] = seconds + span.own, count + 1
    return found


def as_trace(events: Sequence[Event], begin: float, caller: int) -> dict[str, Any]:
    """Return events as Chrome trace events, which Perfetto and chrome://tracing open.

    Args:
        begin: seconds on `time.perf_counter` that become 0.
        caller: identifier of the thread that saved.
    """
    others = dict.fromkeys(event.thread for event in events if event.thread not in (0, caller))
    tracks = {ident: number for number, ident in enumerate((caller, *others), 1)}
    shown: list[dict[str, Any]] = [_named("process_name", 0, name="torch.save")]
    for track in tracks.values():
        name = f"engine thread {track - 1}" if track > 1 else "saving thread"
        shown.append(_named("thread_name", track, name=name))
        shown.append(_named("thread_sort_index", track, sort_index=track))
    for name, thread, start, end in sorted(events, key=lambda event: (event.start, -event.end)):
        if thread:
            place = {"ph": "X", "name": name, "cat": "save", "pid": 1, "tid": tracks[thread]}
            shown.append({**place, "ts": _micro(start - begin), "dur": _micro(end - start)})
    flights = [event for event in events if event.name == IN_FLIGHT]
    changes = [(event.start, 1) for event in flights] + [(event.end, -1) for event in flights]
    changes.sort()
    levels = accumulate(change for _, change in changes)
    for (when, _), level in zip(changes, levels, strict=True):
        place = {"ph": "C", "name": _LEVEL, "pid": 1, "tid": 0, "args": {_LEVEL: level}}
        shown.append({**place, "ts": _micro(when - begin)})
    return {"traceEvents": shown, "displayTimeUnit": "ms"}


def _named(kind: str, track: int, **values: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 1, "tid": track, "args": values}


def _micro(seconds: float) -> float:
    return round(seconds * _MICRO, 3)
