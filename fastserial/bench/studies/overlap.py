"""`fastserial bench overlap`: what checkpoints cost a training run, however they are saved."""

from __future__ import annotations

import copy
import gc
import shutil
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch

from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.identical import different_tensors
from fastserial.bench.measuring.machine import Place
from fastserial.bench.measuring.scratch import scratch
from fastserial.bench.measuring.settle import settle
from fastserial.bench.measuring.summary import Spread
from fastserial.bench.subjects.beside import Way, ways
from fastserial.bench.subjects.contents import unshared
from fastserial.bench.subjects.payload import check_memory
from fastserial.bench.subjects.saving import check_torch
from fastserial.bench.subjects.training import Training
from fastserial.config import current

__all__ = ["OverlapBench", "OverlapLine", "OverlapResult", "run_overlap"]

_HEADROOM = 256 << 20
_STEPS_ALONE = 3  # before anything is measured


@dataclass(frozen=True, slots=True)
class OverlapBench:
    """What to measure.

    Attributes:
        folder: where to write.
        model: a key of `SHAPES`.
        tokens, batch: length and number of the sequences of a step.
        every: a checkpoint each so many steps.
        saves: checkpoints of a run.
        runs: rounds that count, of a run for each way to save, each between two without; one
            warm-up first.
        device: of the model.
        threads: that compute, of which a writer beside them has what they leave; None: torch's own
            number.
        only: parts of the names of the ways that are measured; none: all are.
        pause: seconds of rest between two runs.
    """

    folder: Path
    model: str = "small"
    tokens: int = 256
    batch: int = 2
    every: int = 4
    saves: int = 2
    runs: int = 3
    device: str = "cpu"
    threads: int | None = None
    only: tuple[str, ...] = ()
    pause: float = 0.3

    @property
    def steps(self) -> int:
        """Steps of a run: as many behind the last checkpoint as between two."""
        return self.every * (self.saves + 1)


@dataclass(slots=True)
class OverlapLine:
    """One way to save.

    Attributes:
        name: of the way.
        seconds: of each run.
        without: mean seconds of the runs without checkpoints right before and after each.
        steps: seconds of the steps of the last run, each with the call that saves after it.
        stalls: seconds of each call that saves.
        right: whether what was saved in the warm-up equals what was to be saved; None: nobody
            looked.
        error: why it cannot be measured.
    """

    name: str
    seconds: list[float] = field(default_factory=list)
    without: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)
    right: bool | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class OverlapResult:
    """What was measured, and where.

    Attributes:
        nbytes: of a checkpoint's tensors.
        alone: a run without checkpoints, taken like one with them: what it loses is noise.
        missing: ways that are not there, and why.
    """

    bench: OverlapBench
    place: Place
    nbytes: int
    alone: OverlapLine
    lines: tuple[OverlapLine, ...]
    missing: dict[str, str]

    @property
    def right(self) -> bool:
        """Whether all of our own checkpoints hold what was to be saved."""
        return all(line.right is not False for line in self.lines if "fastserial" in line.name)

    @property
    def step(self) -> float:
        """Seconds of a step without checkpoints."""
        runs = [seconds for line in (self.alone, *self.lines) for seconds in line.without]
        return statistics.median(runs) / self.bench.steps

    def lost(self, line: OverlapLine) -> Spread:
        """Return the seconds that a checkpoint costs, round by round."""
        pairs = zip(line.seconds, line.without, strict=True)
        return Spread.of((mine - without) / self.bench.saves for mine, without in pairs)


def run_overlap(
    bench: OverlapBench, say: Callable[[str], None] = lambda text: None
) -> OverlapResult:
    """Train with each way to save and without, interleaved; `say` receives a text for each run.

    Raises:
        BenchError: no such model or device, too little memory or disk.
        PatchError: the installed torch cannot be patched.
        WriteError: a save failed.
    """
    check_torch()
    before = torch.get_num_threads()
    if bench.threads is not None:
        torch.set_num_threads(bench.threads)
    try:
        return _measured(bench, say)
    finally:
        torch.set_num_threads(before)


def _measured(bench: OverlapBench, say: Callable[[str], None]) -> OverlapResult:
    say("making the model")
    training = Training(bench.model, bench.tokens, bench.batch, bench.device)
    for _ in range(_STEPS_ALONE):
        training.step()
    nbytes = sum(tensor.nbytes for tensor in unshared(training.state()).values())
    check_memory(3 * nbytes)
    found, missing = ways()
    if bench.only:
        found = [way for way in found if any(part in way.name for part in bench.only)]
        missing = {}
        if not found:
            raise BenchError(f"there is no way to save called {' or '.join(bench.only)!r}")
    alone = OverlapLine("no checkpoints")
    lines = [OverlapLine(way.name) for way in found]
    rows: list[tuple[Way | None, OverlapLine]] = [(None, alone), *zip(found, lines, strict=True)]
    with scratch(bench.folder, (bench.saves + 1) * nbytes + _HEADROOM) as folder:
        for turn in range(-1, bench.runs):
            label = f"round {turn + 1}/{bench.runs}" if turn >= 0 else "warm-up"
            before = _run(training, None, OverlapLine(""), bench, folder, turn < 0)
            for way, line in rows:
                if line.error is not None:
                    continue
                say(f"{label}: {line.name}")
                seconds = _run(training, way, line, bench, folder, turn < 0)
                after = _run(training, None, OverlapLine(""), bench, folder, turn < 0)
                if not seconds:  # it failed; what it left running ends meanwhile
                    after = _run(training, None, OverlapLine(""), bench, folder, turn < 0)
                elif turn >= 0:
                    line.seconds.append(seconds)
                    line.without.append((before + after) / 2)
                before = after
    measured = [line for line in lines if line.error is None]
    missing |= {line.name: line.error for line in lines if line.error is not None}
    place = Place.of(bench.folder, current())
    return OverlapResult(bench, place, nbytes, alone, tuple(measured), missing)


def _run(
    training: Training,
    way: Way | None,
    line: OverlapLine,
    bench: OverlapBench,
    folder: Path,
    warming: bool,
) -> float:
    """Train once; returns its seconds, zero if it failed."""
    place = folder / "run"
    place.mkdir()
    gc.collect()
    settle(bench.pause)
    try:
        return _train(training, way, line, bench, place, warming)
    except Exception as error:
        if way is None or "fastserial" in way.name:
            raise
        line.error = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return 0.0
    finally:
        shutil.rmtree(place)


def _train(
    training: Training,
    way: Way | None,
    line: OverlapLine,
    bench: OverlapBench,
    folder: Path,
    warming: bool,
) -> float:
    saver = way.make() if way is not None else None
    steps, stalls = [], []
    expected = None
    count = 2 * bench.every if warming else bench.steps
    began = last = perf_counter()
    for step in range(1, count + 1):
        training.step()
        if saver is not None and step % bench.every == 0 and step < count:
            if warming:
                expected = copy.deepcopy(training.state())
            asked = perf_counter()
            saver.start(training.state(), folder / f"step-{step}.pt")
            stalls.append(perf_counter() - asked)
        now = perf_counter()
        steps.append(now - last)
        last = now
    if saver is not None:
        saver.finish()
    seconds = perf_counter() - began
    if not warming:
        line.steps = steps
        line.stalls += stalls
    elif way is not None and way.load is not None and expected is not None:
        paths = list(folder.iterdir())
        if len(paths) != 1:
            raise BenchError(f"{way.name}: it has left {len(paths)} files")
        there, wanted = unshared(way.load(paths[0])), unshared(expected)
        line.right = there.keys() == wanted.keys() and not different_tensors(wanted, there)
    return seconds
