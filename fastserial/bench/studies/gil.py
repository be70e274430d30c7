"""`fastserial bench gil`: how long a save in the background holds up another Python thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch

import fastserial
from fastserial.bench.measuring.machine import Place
from fastserial.bench.measuring.scratch import scratch
from fastserial.bench.measuring.settle import settle
from fastserial.bench.measuring.summary import Spread
from fastserial.bench.subjects.payload import check_memory, mixed_state
from fastserial.bench.subjects.saving import check_torch, stock, sync
from fastserial.tuning import lookup

__all__ = ["GilBench", "GilLine", "GilResult", "run_gil"]

_HEADROOM = 256 << 20
_NOTED = 0.0005  # seconds: shorter ones are no matter


@dataclass(frozen=True, slots=True)
class GilBench:
    """What to measure: saves of about `nbytes` bytes in `tensors` tensors, `runs` times each."""

    folder: Path
    nbytes: int
    tensors: int = 300
    runs: int = 3
    pause: float = 0.3


@dataclass(frozen=True, slots=True)
class GilLine:
    """One way to save.

    Attributes:
        name: of the way.
        seconds: of the save.
        longest: the longest time that the other thread stood still, of each run (seconds).
        share: of the time of the save, how much of it the other thread stood still.
    """

    name: str
    seconds: Spread
    longest: Spread
    share: Spread


@dataclass(frozen=True, slots=True)
class GilResult:
    """What was measured, and where."""

    bench: GilBench
    place: Place
    lines: tuple[GilLine, ...]


def run_gil(bench: GilBench, say: Callable[[str], None] = lambda text: None) -> GilResult:
    """Let a thread spin while another one saves; `say` receives a text for each run.

    Raises:
        BenchError: too little memory or disk.
        PatchError: the installed torch cannot be patched.
        WriteError: a save failed.
    """
    check_torch()
    check_memory(2 * bench.nbytes)
    say("making the data")
    state = mixed_state(bench.nbytes, bench.tensors)
    ways: dict[str, Callable[[Path], object]] = {
        "nothing, a second": lambda path: sleep(1),
        "stock torch.save in a thread": lambda path: _stock(state, path),
        "fastserial, copy": lambda path: _beside(state, path, snapshot="copy"),
        "fastserial, in place": lambda path: _beside(state, path, snapshot="in_place"),
    }
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    with scratch(bench.folder, bench.nbytes + _HEADROOM) as folder:
        for turn in range(-1, bench.runs):
            for name, save in ways.items():
                say(f"run {turn + 1} of {bench.runs}: {name}")
                settle(bench.pause)
                path = folder / "state.pt"
                spun = _spin(save, path)
                path.unlink(missing_ok=True)
                if turn >= 0:
                    found[name].append(spun)
    lines = [
        GilLine(
            name,
            Spread.of(seconds for seconds, _, _ in runs),
            Spread.of(longest for _, longest, _ in runs),
            Spread.of(still / seconds for seconds, _, still in runs),
        )
        for name, runs in found.items()
    ]
    place = Place.of(bench.folder, lookup.config_for(bench.folder))
    return GilResult(bench, place, tuple(lines))


def _stock(state: dict[str, Any], path: Path) -> None:
    with stock():
        torch.save(state, path)
    sync(path)


def _beside(state: dict[str, Any], path: Path, **options: Any) -> None:
    fastserial.save_async(state, path, **options).wait()


def _spin(save: Callable[[Path], object], path: Path) -> tuple[float, float, float]:
    """Return the seconds of a save, the longest pause of this thread meanwhile, and all of them."""
    errors: list[BaseException] = []
    ended: list[float] = []

    def run() -> None:
        try:
            save(path)
        except BaseException as error:
            errors.append(error)
        finally:
            ended.append(perf_counter())

    thread = threading.Thread(target=run)
    longest = still = 0.0
    began = last = perf_counter()
    thread.start()
    while not ended:
        now = perf_counter()
        if now - last > _NOTED:
            longest = max(longest, now - last)
            still += now - last
        last = now
    thread.join()
    if errors:
        raise errors[0]
    return ended[0] - began, longest, still
