"""Where one save spends its time: step by step of the saving thread, and of the engine's threads.

Saves with and without trace events are made in turn; shown is the one with the median time. The
rows of the saving thread are wall clock and add up to the time of the save. Those of the engine's
threads are thread time, all of them together, and include waiting for a processor. Exit status 1 if
a file differs from stock torch's.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import types
from collections.abc import Iterable
from pathlib import Path
from time import process_time
from typing import NamedTuple

import torch
from common import Picture, Say, Script, size

import fastserial
from fastserial import trace
from fastserial.bench.compare import digest
from fastserial.bench.measure import BenchError
from fastserial.bench.payload import mixed_state
from fastserial.bench.rotation import Spread
from fastserial.bench.state import check_memory, scratch, settle
from fastserial.bench.table import CHECKED, Column, Result, Table, number
from fastserial.bench.torch_rows import Format, fast, fast_row, stock_row
from fastserial.reports import SaveReport, format_bandwidth, format_bytes
from fastserial.trace import Event

_OTHER, _IDLE = "other (Python in between)", "idle (no block to fill or write)"
_WHOLE = "torch.save"
_STEM = "profile"  # the bytes of a zip depend on it
_HEADROOM = 256 << 20
_COPIES = 2
_COLUMNS = (
    Column("seconds", "seconds", number(1, 4)),
    Column("share", "share", lambda share: f"{share:.1%}"),
    Column("times", "times", number()),
)


class _Run(NamedTuple):
    """A profiled save."""

    events: list[Event]
    whole: Event
    cpu_seconds: float
    report: SaveReport

    @property
    def seconds(self) -> float:
        return self.whole.end - self.whole.start


def _measure(options: argparse.Namespace, say: Say) -> Result:
    check_memory(options.size)
    container: Format = "legacy" if options.legacy else "zip"
    with scratch(options.folder, _COPIES * options.size + _HEADROOM) as folder:
        say("making the data")
        state = mixed_state(options.size, options.tensors, options.device)
        path = folder / f"{_STEM}.stock"
        say("stock torch, to compare with")
        stock_row(state, container).run(path)
        wanted = digest(path)
        path.unlink()
        plain = fast_row(state, container)
        runs: list[_Run] = []
        slowdowns: list[float] = []
        identical = True
        for turn in range(-1, options.runs):  # the first is a warm-up
            say(f"run {turn + 1} of {options.runs}")
            path = folder / f"{_STEM}.plain"
            settle(options.pause)
            seconds = plain.run(path).seconds
            path.unlink()
            path = folder / f"{_STEM}.profiled"
            settle(options.pause)
            run = _profiled(state, path, container)
            identical &= digest(path) == wanted
            path.unlink()
            if turn >= 0:
                runs.append(run)
                slowdowns.append(run.seconds / seconds)
    middle = statistics.median_low([run.seconds for run in runs])
    run = next(run for run in runs if run.seconds == middle)
    report = run.report
    caption = (
        f"{container}, {options.tensors} tensors on {options.device}, "
        f"{format_bytes(report.bytes)} in {run.seconds:.3f} s "
        f"({format_bandwidth(report.bytes / run.seconds)}), {run.cpu_seconds:.3f} s of processor "
        f"time; engine {report.engine}, {'direct' if report.direct else 'page cache'}"
    )
    slowdown = number(1, 2)(Spread.of(slowdowns))
    notes = [f"fallback: {report.fallback}"] if report.fallback else []
    notes.append(
        f"The profiled saves took {slowdown} × the time of the plain ones interleaved with them; "
        f"shown is the median of {options.runs}."
    )
    compared = [{"name": "every file", "identical": identical}]
    tables = [Table(compared, [CHECKED[0]], "compared with stock torch's")]
    settings = {name: str(value) for name, value in vars(options).items()}
    more = {"report": report.to_dict(), "seconds": run.seconds, "cpu_seconds": run.cpu_seconds}
    tables = [*_phases(run), *tables]
    return Result("phases", options.folder, caption, settings, tables, notes=notes, more=more)


def _profiled(state: object, path: Path, container: Format) -> _Run:
    events: list[Event] = []
    with fast(durable=True), trace.listen(events.append):
        cpu = process_time()
        with trace.step(_WHOLE):
            torch.save(
                state, path, _traced_pickle(), _use_new_zipfile_serialization=container == "zip"
            )
        cpu = process_time() - cpu
        report = fastserial.last_save_report()
    if report is None or report.path != str(path):
        raise BenchError(f"stock torch wrote {path}, not fastserial")
    whole = next(event for event in events if event.name == _WHOLE)
    return _Run(events, whole, cpu, report)


def _traced_pickle() -> types.ModuleType:
    """Return the module `pickle`, for `torch.save`, with a pickler whose work is a step."""

    class Pickler(pickle.Pickler):
        dump = trace.traced("pickle")(pickle.Pickler.dump)

    module = types.ModuleType("pickle")
    module.__dict__.update(vars(pickle), Pickler=Pickler)
    return module


# -- tables --------------------------------------------------------------------------------------


def _phases(run: _Run) -> list[Table]:
    """Return the phases of the saving thread, and those of the engine's, if there are any."""
    spans = _spans_of(run.events)
    mine = [span for span in spans if span.event.thread == run.whole.thread]
    theirs = [span for span in spans if span.event.thread != run.whole.thread]
    found = _own_seconds(mine)
    found[_OTHER] = found.pop(_WHOLE)
    tables = [_table(found, run.seconds, "saving thread: wall clock")]
    count = len({span.event.thread for span in theirs})
    if not count:
        return tables
    # from the start of the engine until it was stopped, all its threads were there
    start = min(_ends(mine, "start engine"))
    there = (max(_ends(mine, "stop engine")) - start) * count
    work = _own_seconds(theirs)
    work[_IDLE] = max(0.0, there - sum(seconds for seconds, _ in work.values())), 1
    title = f"the engine's {count} threads: thread time, all of them together"
    return [*tables, _table(work, there, title)]


def _table(found: dict[str, tuple[float, int]], whole: float, title: str) -> Table:
    rows = [
        {"name": name, "seconds": seconds, "share": seconds / whole, "times": times}
        for name, (seconds, times) in found.items()
    ]
    return Table(rows, _COLUMNS, title)


class _Span(NamedTuple):
    """A trace event, and `own`: the seconds of it that no event inside it covers."""

    event: Event
    own: float


def _spans_of(events: Iterable[Event]) -> list[_Span]:
    """Return the spans of all threads, thread by thread in the order of their starts."""
    spans: list[_Span] = []
    around: list[int] = []  # indices in `spans` of those that contain the present one
    busy = [event for event in events if event.thread]
    for event in sorted(busy, key=lambda event: (event.thread, event.start, -event.end)):
        while around and not _contains(spans[around[-1]].event, event):
            around.pop()
        if around:
            outer = spans[around[-1]]
            spans[around[-1]] = outer._replace(own=outer.own - (event.end - event.start))
        around.append(len(spans))
        spans.append(_Span(event, event.end - event.start))
    return spans


def _contains(outer: Event, event: Event) -> bool:
    return outer.thread == event.thread and event.end <= outer.end


def _own_seconds(spans: Iterable[_Span]) -> dict[str, tuple[float, int]]:
    """Return own seconds and number of spans by name, in the order of their first start."""
    found: dict[str, tuple[float, int]] = {}
    for span in sorted(spans, key=lambda span: span.event.start):
        seconds, count = found.get(span.event.name, (0.0, 0))
        found[span.event.name] = seconds + span.own, count + 1
    return found


def _ends(spans: list[_Span], name: str) -> list[float]:
    return [span.event.end for span in spans if span.event.name == name]


if __name__ == "__main__":
    picture = Picture("seconds", "seconds", 1)
    script = Script(__doc__, "one minute", {"size": 64 << 20, "runs": 1}, picture)
    script.add("--size", type=size, default=1 << 30, help="of the state dict")
    script.add("--tensors", type=int, default=300, help="of mixed sizes")
    script.add("--legacy", action="store_true", help="torch's legacy format")
    script.add("--device", default="cpu", help="where the tensors are: cpu, cuda, ...")
    script.run(_measure)
