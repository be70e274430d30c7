"""Saves or loads that signal handlers interrupt at random moments; prints what was left behind.

    python interrupted.py FOLDER save|load|tool raise|work COUNT [unguarded|open|blind]

raise: the handler raises, once or up to three times in short order (a second Ctrl-C). Whatever it
raises comes out: the same object, and never nothing.
work: it saves and loads itself, and now and then raises after that.
Prints JSON: how often it rang, in how many of the tracebacks there were frames of fastserial, and
before and after: descriptors, threads, the collector, memory; and what was wrong, such as a file
that is neither the old nor the new one, which have the same bytes here.

All file systems count as remote ones, which are asked again after an error.

Controls: `unguarded`, see `take_guards_away`; `open`, files that are kept open,
so that they are overwritten and not replaced; `blind`, the package takes each error for its own.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fastserial
from fastserial import interrupts
from fastserial.errors import CorruptCheckpointError, WriteError
from fastserial.files import destination, linux

PACKAGE = os.path.dirname(fastserial.__file__)
BLOCKS = {"block_size": 65536, "threads": 3, "small_file": 32768, "durable": False}
MOST_IN_A_ROW = 3
SEED = "20261121"
_PARTS = 4  # in which the memory is compared
STUCK = 120  # seconds without the end of a trial


class Interrupt(BaseException):
    """What the handler raises, as KeyboardInterrupt."""


class Impatience(Exception):
    """What other handlers raise, such as those of time limits."""


def numbered(number: int) -> OSError:
    return OSError(number, os.strerror(number))


# What handlers raise, some of which system calls raise, too.
RAISED: list[Callable[[], BaseException]] = [
    Interrupt, Impatience, TimeoutError, OSError, FileNotFoundError, RuntimeError, ValueError,
    KeyError, MemoryError,
    *(partial(numbered, one) for one in (
        errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EINVAL, errno.ENOENT, errno.EEXIST,
        errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.EAGAIN, errno.ETIMEDOUT, errno.EMFILE,
    )),
    partial(WriteError, errno.EIO, "of another save", "other.pt"),
    partial(CorruptCheckpointError, "another file is damaged"),
]  # fmt: skip


def state() -> dict[str, Any]:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[1])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "enabled": gc.isenabled(),
        "thresholds": gc.get_threshold(),
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
    }


def settled(before: dict[str, Any]) -> dict[str, Any]:
    """Return the state, once what ends by itself has had its time."""
    gc.collect()  # tracebacks make cycles
    for _ in range(60):
        after = state()
        if all(after[kind] <= before[kind] for kind in ("threads", "descriptors")):
            break
        time.sleep(0.05)
    return after


def take_guards_away() -> None:
    """Descriptors do not close themselves, and clean-up ends where it is interrupted."""

    def finish_once(*steps: Callable[[], object]) -> None:
        for step in steps:
            step()

    del interrupts.Descriptors.__del__
    for module in list(sys.modules.values()):
        if getattr(module, "finish", None) is interrupts.finish:
            module.finish = finish_once  # type: ignore[attr-defined]


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def swallowed(error: BaseException) -> bool:
    """Return whether it was the package that handled an error, where it got to last."""
    frames = traceback.extract_tb(error.__traceback__)  # `copyreg` swallows all, for example
    return bool(frames) and frames[0].filename.startswith(PACKAGE)


def torchs_own(error: BaseException) -> bool:
    """Return whether torch raised an error in a line of its own."""
    frames = traceback.extract_tb(error.__traceback__)
    return not frames[-1].filename.startswith(PACKAGE)


class Trials:
    def __init__(self, folder: Path, what: str, dice: random.Random) -> None:
        self.folder = folder
        self.dice = dice
        self.found: Counter[str] = Counter()
        self.left = 0
        self.wrong: list[str] = []
        self.small = {"x": torch.arange(50.0), "y": 1}
        self.large = {str(i): torch.full((9000,), float(i)) for i in range(12)}
        self.many = [torch.full((4,), float(i)) for i in range(200)]
        for name, value in (("small", self.small), ("large", self.large), ("many", self.many)):
            torch.save(value, folder / f"{name}.pt")
        torch.save(self.large, folder / "legacy.pt", _use_new_zipfile_serialization=False)
        self.lazy = fastserial.open(folder / "large.pt")
        self.targets: list[Path] = []
        self.whole: dict[Path, bytes] = {}
        self.raised: list[BaseException] = []  # by the handler, in the present trial
        self.calls = {"save": self.saves, "load": self.loads, "tool": self.tools}[what]()

    def saves(self) -> list[Callable[[], object]]:
        folder = self.folder / "made"
        folder.mkdir()
        zipped, legacy = folder / "zip.pt", folder / "legacy.pt"
        self.targets = [folder / "small.pt", zipped, legacy]

        def to_file() -> None:
            with open(folder / "file.pt", "wb") as file:
                torch.save(self.large, file)

        return [
            lambda: torch.save(self.small, folder / "small.pt"),
            lambda: torch.save(self.large, zipped),
            lambda: torch.save(self.large, legacy, _use_new_zipfile_serialization=False),
            to_file,
        ]

    def loads(self) -> list[Callable[[], object]]:
        folder = self.folder
        target = {key: torch.empty_like(value) for key, value in self.large.items()}
        return [
            lambda: torch.load(folder / "small.pt"),
            lambda: torch.load(folder / "large.pt"),
            lambda: torch.load(folder / "many.pt"),
            lambda: torch.load(folder / "legacy.pt"),
            lambda: fastserial.load(folder / "large.pt", verify=True),
            lambda: fastserial.load_into(target, folder / "large.pt"),
            lambda: self.lazy.get_tensor(self.dice.choice(list(self.large))),
        ]

    def tools(self) -> list[Callable[[], object]]:
        folder = self.folder / "made"
        folder.mkdir()
        large, many = self.folder / "large.pt", self.folder / "many.pt"
        self.targets = [folder / "c.safetensors", folder / "c.pt", folder / "async.pt"]
        model = torch.nn.Linear(40, 40)
        saver = fastserial.Checkpointer(self.folder / "run", {"model": model, "large": self.large})
        steps = itertools.count(1)

        def checkpoint() -> None:
            saver.save(next(steps))
            saver.wait()

        return [
            lambda: fastserial.convert(large, self.targets[0]),
            lambda: fastserial.convert(self.folder / "legacy.pt", self.targets[1]),
            lambda: self.expect_ok(fastserial.verify(large)),
            lambda: self.expect_ok(fastserial.verify(many)),
            lambda: self.expect_ok(fastserial.verify(self.folder / "legacy.pt")),
            lambda: fastserial.inspect(large),
            lambda: fastserial.save_async(self.large, self.targets[2]).result(),
            checkpoint,
            saver.resume,
        ]

    def expect_ok(self, report: Any) -> None:
        if report.status != "ok":
            self.wrong.append(str(report))

    def read_once(self) -> None:
        """Read undisturbed."""
        self.left = 0
        self.lazy.get_tensor(next(iter(self.large)))

    def raises(self, *_: object) -> None:
        if self.left > 0:
            self.left -= 1
            self.found["rung"] += 1
            if self.left:
                signal.setitimer(signal.ITIMER_REAL, self.dice.uniform(1e-5, 1e-3))
            self.raised.append(self.dice.choice(RAISED)())
            raise self.raised[-1]  # no variable: its frame would keep it, and it its frame

    def works(self, *_: object) -> None:
        if self.left <= 0:
            return
        self.left = 0
        self.found["rung"] += 1
        call = self.dice.choice(["save", "load", "read"])
        if call == "save":
            torch.save(self.large, self.folder / "handler.pt")
        elif call == "load":
            if len(torch.load(self.folder / "large.pt")) != len(self.large):
                self.wrong.append("loaded something else")
            torch.load(self.folder / "many.pt")
        elif not torch.equal(self.lazy.get_tensor("7"), self.large["7"]):
            self.wrong.append("read something else")
        if self.dice.random() < 0.3:
            self.raised.append(Interrupt())
            raise self.raised[-1]

    def ignored(self, what: Any) -> None:
        """Count what Python prints, and nobody can catch: the handler ran in a `__del__`."""
        if what.exc_value in self.raised:
            self.raised.remove(what.exc_value)
            self.found["in a finalizer"] += 1
        else:
            self.wrong.append(f"{what.err_msg}: {what.exc_value!r}")

    def attempt(self, call: Callable[[], object], took: float, most: int) -> None:
        self.raised.clear()
        try:
            self.left = self.dice.randint(1, most)
            signal.setitimer(signal.ITIMER_REAL, self.dice.uniform(1e-6, took * 1.1))
            call()
            self.left = 0
            self.wrong += ["swallowed: " + shown(one) for one in self.raised if swallowed(one)]
        except BaseException as error:
            self.left = 0
            self.note(error)

    def note(self, error: BaseException) -> None:
        """Count where the handler raised; any other error is wrong."""
        if "an exception occurred" in str(error):  # in `load_state_dict`, which keeps its text only
            self.found["taken by torch"] += 1
            return
        first: BaseException | None = error  # torch takes an error in a file for a bad file
        while first is not None and first not in self.raised and not torchs_own(first):
            first = None
        while first is not None and first not in self.raised:
            first = first.__cause__ or first.__context__
        if first is None:
            self.wrong.append(shown(error))
            return
        files = [frame.filename for frame in traceback.extract_tb(first.__traceback__)]
        self.found["inside"] += any(name.startswith(PACKAGE) for name in files)

    def look(self, index: int) -> None:
        """Compare the file that a save was to write, and look for others."""
        if index >= len(self.targets):
            return
        path = self.targets[index]
        if path.read_bytes() != self.whole[path]:
            self.wrong.append(f"{path.name} is torn")
        if any(name.startswith(".") for name in os.listdir(path.parent)):
            self.wrong.append(f"left beside {path.name}: {os.listdir(path.parent)}")

    def run(self, count: int, most: int) -> None:
        self.raised.clear()  # with the loads that its frames hold: what follows is no part of them
        gc.collect()
        durations = []
        for call in self.calls:
            call()
            start = time.perf_counter()
            call()
            durations.append(time.perf_counter() - start)
        self.whole = {path: path.read_bytes() for path in self.targets}
        first = self.found["rung"]
        while self.found["rung"] - first < count:
            faulthandler.dump_traceback_later(STUCK, exit=True)
            index = self.dice.randrange(len(self.calls))
            try:
                self.attempt(self.calls[index], durations[index], most)
            except BaseException as error:  # in the lines around the call
                if error not in self.raised:
                    raise
                self.left = 0
            self.look(index)
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)


def main(folder: str, what: str, handler: str, count: str, guards: str = "guarded") -> None:
    if guards == "unguarded":
        take_guards_away()
    if guards == "blind":
        interrupts.is_foreign = lambda error: False  # type: ignore[assignment]
    torch.set_num_threads(1)
    destination.LARGE_FILE = 1 << 20
    linux.LOCAL = frozenset()
    fastserial.install(**BLOCKS)
    trials = Trials(Path(folder), what, random.Random(SEED))
    kept = contextlib.ExitStack()
    if guards == "open":
        for call in trials.calls:
            call()
        for path in trials.targets:
            kept.enter_context(path.open("r+b"))
    sys.unraisablehook = trials.ignored
    signal.signal(signal.SIGALRM, trials.raises if handler == "raise" else trials.works)
    most = MOST_IN_A_ROW if handler == "raise" else 1
    trials.run(max(20, int(count) // 10), most)  # until all memory was used once
    trials.read_once()
    before = settled({"threads": 1, "descriptors": 1})
    trials.found.clear()
    memory = [before["memory"]]
    for _ in range(_PARTS):
        trials.run(int(count) // _PARTS, most)
        memory.append(settled(before)["memory"])
    destination.wait_until_free()
    trials.read_once()
    after = settled(before)
    for call in trials.calls:
        call()
    names = sorted(os.listdir(trials.folder / "made")) if what != "load" else []
    # What is lost is lost in every part; garbage that waits for its collection is not.
    growth = min(after - before for before, after in itertools.pairwise(memory))
    result = {"before": before, "after": after, "names": names, "wrong": trials.wrong[:3]}
    print(json.dumps({**result, "growth": growth, "found": dict(trials.found)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
