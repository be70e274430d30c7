"""`fastserial bench gil`: how long a save in the background holds up another Python thread."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, BinaryIO, NamedTuple

import torch

import fastserial
from fastserial.bench.measuring.machine import Place
from fastserial.bench.measuring.scratch import scratch
from fastserial.bench.measuring.settle import settle
from fastserial.bench.measuring.summary import Spread
from fastserial.bench.subjects.payload import check_memory, mixed_state
from fastserial.bench.subjects.saving import check_torch, stock, sync
from fastserial.config import current

__all__ = ["GilBench", "GilLine", "GilResult", "run_gil"]

_HEADROOM = 256 << 20
_NOTED = 0.0005  # seconds: shorter ones are no matter
_ACCOUNT = "/proc/thread-self/schedstat"  # the kernel's, of the calling thread
_LOOK = 500  # turns of the spinning thread between two looks at the kernel's account


@dataclass(frozen=True, slots=True)
class GilBench:
    """What to measure: saves of about `nbytes` bytes in `tensors` tensors, `runs` times each.

    `pause`: seconds of rest before each. A hypervisor that takes freed memory back (free page
    reporting) does so for half a minute, every 2 s; the whole machine stands still meanwhile.
    """

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
        held: likewise, without the time in which it was ready to run and had no CPU: what is left
            is the wait for the interpreter's lock. None where the kernel does not tell.
        share: of the time of the save, how much of it the other thread stood still.
    """

    name: str
    seconds: Spread
    longest: Spread
    held: Spread | None
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
    found: dict[str, list[_Spun]] = {name: [] for name in ways}
    with scratch(bench.folder, bench.nbytes + _HEADROOM) as folder:
        for turn in range(-1, bench.runs):
            for name, save in ways.items():
                say(f"run {turn + 1} of {bench.runs}: {name}")
                settle(bench.pause)
                gc.collect()  # a full collection is Python's own affair; none is due meanwhile
                path = folder / "state.pt"
                spun = _spin(save, path)
                path.unlink(missing_ok=True)
                if turn >= 0:
                    found[name].append(spun)
    lines = [
        GilLine(
            name,
            Spread.of(run.seconds for run in runs),
            Spread.of(run.longest for run in runs),
            Spread.of(run.held for run in runs) if os.path.exists(_ACCOUNT) else None,
            Spread.of(run.still / run.seconds for run in runs),
        )
        for name, runs in found.items()
    ]
    place = Place.of(bench.folder, current())
    return GilResult(bench, place, tuple(lines))


def _stock(state: dict[str, Any], path: Path) -> None:
    with stock():
        torch.save(state, path)
    sync(path)


def _beside(state: dict[str, Any], path: Path, **options: Any) -> None:
    fastserial.save_async(state, path, **options).wait()


class _Spun(NamedTuple):
    """A save beside a spinning thread: seconds, and for how many of them that stood still."""

    seconds: float
    longest: float
    held: float
    still: float


def _without_cpu(account: BinaryIO) -> Callable[[], float]:
    """Return what tells for how many seconds a thread was ready to run and had no CPU.

    It keeps the interpreter's lock: giving it up is what is measured.
    """
    fd, text = account.fileno(), ctypes.create_string_buffer(128)
    read = ctypes.PyDLL(None).pread
    read.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long)

    def seconds() -> float:
        length = read(fd, text, len(text), 0)
        return int(text.raw[:length].split()[1]) * 1e-9

    return seconds


def _spin(save: Callable[[Path], object], path: Path) -> _Spun:
    """Save, and let this thread spin meanwhile."""
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
    try:
        with open(_ACCOUNT, "rb", buffering=0) as account:
            spun = _turn(thread, ended, _without_cpu(account))
    except FileNotFoundError:
        spun = _turn(thread, ended, lambda: 0.0)
    if errors:
        raise errors[0]
    return spun


def _turn(thread: threading.Thread, ended: list[float], without_cpu: Callable[[], float]) -> _Spun:
    """Start a thread, and note how long this one stands still until the other has ended."""
    longest = held = still = 0.0
    turns, before = 0, without_cpu()
    began = last = perf_counter()
    thread.start()
    while not ended:
        now = perf_counter()
        turns += 1
        if now - last > _NOTED:
            waited, before = before, without_cpu()
            longest = max(longest, now - last)
            held = max(held, now - last - (before - waited))
            still += now - last
        elif turns % _LOOK == 0:
            before = without_cpu()
        last = now
    thread.join()
    return _Spun(ended[0] - began, longest, held, still)
