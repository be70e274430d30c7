"""How long a save in the background holds up another Python thread.

A thread spins while another one saves; timed are the moments in which it stands still. Python lets
a thread wait 5 ms before it asks another one for the interpreter's lock. Saves are durable: stock's
with the fsync of file and directory. A hypervisor that takes freed memory back (free page
reporting) does so for half a minute, every 2 s, and the whole machine stands still meanwhile: give
--pause 30.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, BinaryIO, NamedTuple

import torch
from common import Picture, Say, Script, size

import fastserial
from fastserial.bench.payload import mixed_state
from fastserial.bench.state import check_memory, scratch, settle
from fastserial.bench.table import Column, Result, Spread, Table, number
from fastserial.bench.torch_rows import fast, stock, sync
from fastserial.reports import format_bytes

_HEADROOM = 256 << 20
_NOTED = 0.0005  # seconds: shorter ones are no matter
_ACCOUNT = "/proc/thread-self/schedstat"  # the kernel's, of the calling thread
_LOOK = 500  # turns of the spinning thread between two looks at the kernel's account
_COLUMNS = (
    Column("seconds", "save, s", number(1, 2)),
    Column("longest_seconds", "longest pause of a spinning thread, ms", number(1e-3, 1)),
    Column("held_seconds", "though it had a CPU, ms", number(1e-3, 1)),
    Column("share", "pauses, %", number(1e-2, 1)),
)


class _Spun(NamedTuple):
    """A save beside a spinning thread, in seconds.

    Attributes:
        seconds: of the save.
        longest: the longest time that the other thread stood still.
        held: likewise, without the time in which it was ready to run and had no CPU: what is left
            is the wait for the interpreter's lock.
        still: all its times together.
    """

    seconds: float
    longest: float
    held: float
    still: float


def _measure(options: argparse.Namespace, say: Say) -> Result:
    with fast():
        pass
    check_memory(2 * options.size)
    say("making the data")
    state = mixed_state(options.size, options.tensors)
    saves: dict[str, Callable[[Path], object]] = {
        "nothing, a second": lambda path: sleep(1),
        "stock torch.save in a thread": partial(_stock, state),
        "fastserial, save_async": partial(_beside, state),
    }
    found: dict[str, list[_Spun]] = {name: [] for name in saves}
    with scratch(options.folder, options.size + _HEADROOM) as folder:
        for turn in range(-1, options.runs):  # the first is a warm-up
            for name, save in saves.items():
                say(f"run {turn + 1} of {options.runs}: {name}")
                settle(options.pause)
                gc.collect()  # a full collection is Python's own affair; none is due meanwhile
                path = folder / "state.pt"
                spun = _spin(save, path)
                path.unlink(missing_ok=True)
                if turn >= 0:
                    found[name].append(spun)
    rows = [
        {
            "name": name,
            "seconds": Spread.of(run.seconds for run in runs),
            "longest_seconds": Spread.of(run.longest for run in runs),
            "held_seconds": Spread.of(run.held for run in runs) if _has_account() else None,
            "share": Spread.of(run.still / run.seconds for run in runs),
        }
        for name, runs in found.items()
    ]
    caption = (
        f"{options.tensors} tensors, {format_bytes(options.size)}; medians of {options.runs} "
        "interleaved runs (least–greatest)"
    )
    settings = {"nbytes": options.size, "tensors": options.tensors, "pause": options.pause}
    return Result("threads", options.folder, caption, settings, [Table(rows, _COLUMNS)])


def _stock(state: dict[str, Any], path: Path) -> None:
    with stock():
        torch.save(state, path)
    sync(path)


def _beside(state: dict[str, Any], path: Path) -> None:
    fastserial.save_async(state, path).wait()


def _has_account() -> bool:
    return os.path.exists(_ACCOUNT)


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
    if _has_account():
        with open(_ACCOUNT, "rb", buffering=0) as account:
            spun = _turn(thread, ended, _without_cpu(account))
    else:
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


if __name__ == "__main__":
    picture = Picture("longest_seconds", "longest pause of a spinning thread, ms", 1e-3)
    script = Script(__doc__, "three minutes", {"size": 64 << 20, "runs": 1}, picture)
    script.add("--size", type=size, default=3 << 30, help="of the state dict")
    script.add("--tensors", type=int, default=300, help="of mixed sizes")
    script.run(_measure)
