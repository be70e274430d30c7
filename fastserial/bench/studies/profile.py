"""`fastserial bench profile`: where one save spends its time."""

from __future__ import annotations

import pickle
import statistics
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

import torch

import fastserial
from fastserial import trace
from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.identical import digest
from fastserial.bench.measuring.machine import Machine, this_machine
from fastserial.bench.measuring.scratch import scratch
from fastserial.bench.measuring.settle import settle
from fastserial.bench.measuring.summary import Spread
from fastserial.bench.studies.spans import Span, as_trace, self_seconds, spans_of
from fastserial.bench.subjects.payload import check_memory, mixed_state
from fastserial.bench.subjects.saving import Format, fast
from fastserial.bench.subjects.torch_rows import fast_row, stock_row
from fastserial.diagnosis.folder import Folder, probe_folder
from fastserial.reports import SaveReport

__all__ = ["IDLE", "OTHER", "Phase", "ProfileBench", "ProfileResult", "run_profile"]

OTHER = "other"
IDLE = "idle"
_WHOLE = "torch.save"
_STEM = "profile"  # the bytes of a zip depend on it
_HEADROOM = 256 << 20
_PAUSE = 0.3
_COPIES = 2


@dataclass(frozen=True, slots=True)
class ProfileBench:
    """What to profile: a save of about `nbytes` bytes in `tensors` tensors, `runs` times.

    Attributes:
        container: `zip` or `legacy`.
        device: of the tensors.
        pause: seconds of rest between two saves.
    """

    folder: Path
    nbytes: int
    tensors: int = 300
    runs: int = 3
    container: Format = "zip"
    device: str = "cpu"
    pause: float = _PAUSE


@dataclass(frozen=True, slots=True)
class Phase:
    """Seconds one kind of work took, how often it was done, and its share of its table."""

    name: str
    seconds: float
    count: int
    share: float


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """One save, the one with the median time.

    Attributes:
        seconds, cpu_seconds: of the profiled save, wall clock and processor time of all threads.
        caller: wall clock of the saving thread; the phases add up to `seconds`.
        workers: thread time of the engine's threads, summed over them; with 6 threads there are 6
            seconds of it per second.
        worker_count: how many threads that is.
        slowdown: time of a profiled save over that of one that is not, run by run.
        identical: the profiled saves wrote what stock torch writes.
        trace: Chrome trace events.
    """

    bench: ProfileBench
    machine: Machine
    folder: Folder
    report: SaveReport
    seconds: float
    cpu_seconds: float
    caller: tuple[Phase, ...]
    workers: tuple[Phase, ...]
    worker_count: int
    slowdown: Spread
    identical: bool
    trace: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Run:
    events: list[trace.Event]
    whole: trace.Event
    cpu_seconds: float
    report: SaveReport

    @property
    def seconds(self) -> float:
        return self.whole.end - self.whole.start


def run_profile(
    bench: ProfileBench, say: Callable[[str], None] = lambda text: None
) -> ProfileResult:
    """Save with and without profiling in turn, and return what the profiled saves show.

    Raises:
        BenchError: too little memory or disk, or no such device.
        PatchError: the installed torch cannot be patched.
        WriteError: a save failed.
    """
    check_memory(bench.nbytes)
    with scratch(bench.folder, _COPIES * bench.nbytes + _HEADROOM) as folder:
        say("making the data")
        state = _on_device(mixed_state(bench.nbytes, bench.tensors), bench.device)
        path = folder / f"{_STEM}.stock"
        say("stock torch, to compare with")
        stock_row(state, bench.container).run(path)
        wanted = digest(path)
        path.unlink()
        plain = fast_row(state, bench.container)
        runs: list[_Run] = []
        slowdowns: list[float] = []
        identical = True
        for turn in range(-1, bench.runs):  # the first is a warm-up
            say(f"run {turn + 1} of {bench.runs}")
            path = folder / f"{_STEM}.plain"
            settle(bench.pause)
            seconds = plain.run(path).seconds
            path.unlink()
            path = folder / f"{_STEM}.profiled"
            settle(bench.pause)
            run = _profiled(state, path, bench.container)
            identical &= digest(path) == wanted
            path.unlink()
            if turn >= 0:
                runs.append(run)
                slowdowns.append(run.seconds / seconds)
    middle = statistics.median_low([run.seconds for run in runs])
    run = next(run for run in runs if run.seconds == middle)
    caller, workers, count = _phases(run)
    return ProfileResult(
        bench,
        this_machine(),
        probe_folder(bench.folder),
        run.report,
        run.seconds,
        run.cpu_seconds,
        caller,
        workers,
        count,
        Spread.of(slowdowns),
        identical,
        as_trace(run.events, run.whole.start, run.whole.thread),
    )


def _profiled(state: object, path: Path, container: Format) -> _Run:
    events: list[trace.Event] = []
    with fast(durable=True), trace.listen(events.append):
        cpu = process_time()
        with trace.step(_WHOLE):
            torch.save(
                state, path, _traced_pickle(), _use_new_zipfile_serialization=container == "zip"
            )
        cpu = process_time() - cpu
        report = fastserial.last_save_report()
    if report is None or report.path != str(path):
        raise BenchError(f"torch wrote {path} its own way, not fastserial")
    whole = next(event for event in events if event.name == _WHOLE)
    return _Run(events, whole, cpu, report)


def _traced_pickle() -> types.ModuleType:
    """Return the module `pickle`, for `torch.save`, with a pickler whose work is a step."""

    class Pickler(pickle.Pickler):
        dump = trace.traced("pickle")(pickle.Pickler.dump)

    module = types.ModuleType("pickle")
    module.__dict__.update(vars(pickle), Pickler=Pickler)
    return module


def _phases(run: _Run) -> tuple[tuple[Phase, ...], tuple[Phase, ...], int]:
    """Return the phases of the saving thread and of the engine's, and how many those are."""
    spans = spans_of(run.events)
    caller = run.whole.thread
    mine = [span for span in spans if span.event.thread == caller]
    theirs = [span for span in spans if span.event.thread != caller]
    found = self_seconds(mine)
    found[OTHER] = found.pop(_WHOLE)
    table = _table(found, run.seconds)
    count = len({span.event.thread for span in theirs})
    if not count:
        return table, (), 0
    # from the start of the engine until it was stopped, all its threads were there
    start = min(_ends(mine, "start engine"))
    there = (max(_ends(mine, "stop engine")) - start) * count
    work = self_seconds(theirs)
    work[IDLE] = max(0.0, there - sum(seconds for seconds, _ in work.values())), 1
    return table, _table(work, there), count


def _table(found: dict[str, tuple[float, int]], whole: float) -> tuple[Phase, ...]:
    return tuple(Phase(name, seconds, n, seconds / whole) for name, (seconds, n) in found.items())


def _ends(spans: list[Span], name: str) -> list[float]:
    return [span.event.end for span in spans if span.event.name == name]


def _on_device(state: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    try:
        return {name: tensor.to(device) for name, tensor in state.items()}
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        raise BenchError(f"there is no device {device!r} here: {error}") from error
