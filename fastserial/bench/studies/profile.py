"""`fastserial bench profile`: where one save spends its time."""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

import torch

import fastserial
from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.identical import digest
from fastserial.bench.measuring.machine import Machine, this_machine
from fastserial.bench.measuring.scratch import scratch
from fastserial.bench.measuring.settle import settle
from fastserial.bench.measuring.summary import Spread
from fastserial.bench.studies.instrument import IN_FLIGHT, instrumented, recording_pickle
from fastserial.bench.studies.spans import Recorder, Span, as_trace, self_seconds
from fastserial.bench.subjects.payload import check_memory, mixed_state
from fastserial.bench.subjects.saving import Format, fast
from fastserial.bench.subjects.torch_rows import fast_row, stock_row
from fastserial.diagnosis.folder import Folder, probe_folder
from fastserial.engines import load
from fastserial.reports import SaveReport
from fastserial.tuning import lookup
from fastserial.tuning.store import Settings

__all__ = ["IDLE", "OTHER", "Phase", "ProfileBench", "ProfileResult", "run_profile"]

OTHER = "other"
IDLE = "idle"
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
    settings: Settings
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
    recorder: Recorder
    whole: Span
    cpu_seconds: float
    report: SaveReport


def run_profile(
    bench: ProfileBench, say: Callable[[str], None] = lambda text: None
) -> ProfileResult:
    """Save with and without profiling in turn, and return what the profiled saves show.

    Raises:
        BenchError: too little memory or disk, no such device, or an engine that writes no data.
        PatchError: the installed torch cannot be patched.
        WriteError: a save failed.
    """
    check_memory(bench.nbytes)
    with scratch(bench.folder, _COPIES * bench.nbytes + _HEADROOM) as folder:
        settings = Settings.of(lookup.config_for(bench.folder))
        if not load(settings.engine).capabilities.moves_data:
            raise BenchError(f"engine {settings.engine!r} writes no data: there is no profile")
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
                slowdowns.append(run.whole.seconds / seconds)
    middle = statistics.median_low([run.whole.seconds for run in runs])
    run = next(run for run in runs if run.whole.seconds == middle)
    caller, workers, count = _phases(run)
    return ProfileResult(
        bench,
        this_machine(),
        probe_folder(bench.folder),
        settings,
        run.report,
        run.whole.seconds,
        run.cpu_seconds,
        caller,
        workers,
        count,
        Spread.of(slowdowns),
        identical,
        as_trace(run.recorder, run.whole.start, IN_FLIGHT),
    )


def _profiled(state: object, path: Path, container: Format) -> _Run:
    recorder = Recorder()
    module = recording_pickle(recorder)
    zip_container = container == "zip"
    with fast(durable=True), instrumented(recorder):
        cpu = process_time()
        recorder.call(
            "torch.save",
            torch.save,
            state,
            path,
            module,
            _use_new_zipfile_serialization=zip_container,
        )
        cpu = process_time() - cpu
        report = fastserial.last_save_report()
    if report is None or report.path != str(path):
        raise BenchError(f"torch wrote {path} its own way, not fastserial")
    return _Run(recorder, recorder.spans[-1], cpu, report)


def _phases(run: _Run) -> tuple[tuple[Phase, ...], tuple[Phase, ...], int]:
    """Return the phases of the saving thread and of the engine's, and how many those are."""
    caller = threading.get_ident()
    mine = [span for span in run.recorder.spans if span.thread == caller]
    theirs = [span for span in run.recorder.spans if span.thread != caller]
    found = self_seconds(mine)
    other = found.pop("torch.save")[0]
    whole = run.whole.seconds
    table = [Phase(name, seconds, n, seconds / whole) for name, (seconds, n) in found.items()]
    table.append(Phase(OTHER, other, 1, other / whole))
    count = len({span.thread for span in theirs})
    if not count:
        return tuple(table), (), 0
    # from the start of the engine until it was stopped, all its threads were there
    start = min(span.end for span in mine if span.name == "start engine")
    stop = max(span.end for span in mine if span.name == "stop engine")
    there = (stop - start) * count
    work = self_seconds(theirs)
    idle = max(0.0, there - sum(seconds for seconds, _ in work.values()))
    rows = [Phase(name, seconds, n, seconds / there) for name, (seconds, n) in work.items()]
    rows.append(Phase(IDLE, idle, 1, idle / there))
    return tuple(table), tuple(rows), count


def _on_device(state: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    try:
        return {name: tensor.to(device) for name, tensor in state.items()}
    except (RuntimeError, AssertionError) as error:  # a build without CUDA asserts
        raise BenchError(f"there is no device {device!r} here: {error}") from error
