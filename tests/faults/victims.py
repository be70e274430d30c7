"""Processes that save over and over until something happens to them: `programs/faults/victim.py`.

A zygote imports torch and fastserial once and forks a victim for each trial.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from types import TracebackType
from typing import Any

from states import check
from support import processes
from support.ranks import Job, Server

_PATIENCE = 60.0
# Every way of a save: what a victim may be told of it.
JOBS: dict[str, dict[str, Any]] = {
    "zip": {"nbytes": 12 << 20},
    "legacy": {"nbytes": 9_000_001, "zipped": False},
    "small": {"nbytes": 4_000},
    "named": {"nbytes": 5_000_000, "named": True},
    "page cache": {"nbytes": 5_000_000, "zipped": False, "options": {"direct": False}},
    "buffered": {"nbytes": 5_000_000, "options": {"small_file": 8 << 20}},
    "not durable": {"nbytes": 3_000_000, "options": {"durable": False}},
}
DURABLE = {name: job for name, job in JOBS.items() if name != "not durable"}


class Victim:
    """A process that saves."""

    def __init__(self, server: Server, job: dict[str, Any]) -> None:
        self.path: str = job["path"]
        self._job = Job("victim", 1, json.dumps(job), server=server)
        self.pid = self._job.pid(0)
        self.folder = self._job.folder  # what a test notes of it may lie there

    def lines(self) -> list[str]:
        """Return what it has said by now, of whole lines."""
        return self._job.out(0).split("\n")[:-1]

    def last(self, word: str) -> int | None:
        """Return the number of the last save that has started (`start`) or returned (`done`)."""
        numbers = [int(line.split()[1]) for line in self.lines() if line.startswith(word + " ")]
        return numbers[-1] if numbers else None

    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return not (self._job.folder / "codes").exists()

    def is_saving(self) -> bool:
        """Whether the last save that has started has not returned."""
        return self.last("start") != self.last("done")

    def await_line(self, word: str) -> None:
        """Wait until the victim has said a line that starts with `word`."""
        deadline = time.monotonic() + _PATIENCE
        while not any(line.startswith(word) for line in self.lines()):
            assert time.monotonic() < deadline, f"no {word!r} from the victim: {self.lines()}"
            time.sleep(0.0005)

    def resume(self) -> None:
        """Let a victim that was started with `pause` go on."""
        os.kill(self.pid, signal.SIGUSR1)

    def told(self, word: str) -> dict[str, Any]:
        """Return what its last save raised (`error`), or the report of that (`report`)."""
        lines = [line for line in self.lines() if line.startswith(word + " ")]
        found: dict[str, Any] = json.loads(lines[-1].removeprefix(word))
        return found

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def kill_in_a_save(self, dice: random.Random, *seconds: float) -> None:
        """Kill it within any of these times after its first save has started."""
        self.await_line("start")
        time.sleep(dice.uniform(0, dice.choice(seconds)))
        self.kill()

    def left(self, before: int = 0) -> int:
        """Check the checkpoint that it left: of its last save that returned, or one that had begun.

        Args:
            before: the checkpoint that was there when it started.
        """
        returned, begun, found = self.last("done") or before, self.last("start"), check(self.path)
        assert begun is not None
        assert returned <= found <= begun, (returned, found, begun)
        return found

    def wait(self) -> int:
        """Wait for its end and return the exit status, negative for a signal."""
        return self.ended().code

    def ended(self) -> processes.Ended:
        """Wait for its end, and return what it came to."""
        return self._job.wait()[0]


class Zygote:
    """The parent of the victims, in a process of its own."""

    def __init__(self, variables: dict[str, str] | None = None) -> None:
        path = [str(processes.program("victim").parent), processes.environment()["PYTHONPATH"]]
        found = {"PYTHONPATH": os.pathsep.join(path), **(variables or {})}
        self._server = Server("victim", variables=found)

    def start(self, path: str | os.PathLike[str], first: int, count: int, **job: Any) -> Victim:
        """Start a victim that saves states `first`, `first + 1`, ... to a path.

        What else it may be told is in `JOB` of the program.
        """
        return Victim(
            self._server, {"path": os.fspath(path), "first": first, "count": count, **job}
        )

    def job(self, name: str, count: int, *words: object) -> Job:
        """Start ranks that see what is mounted here: other servers may be older than it."""
        return Job(name, count, *words, server=self._server)

    def __enter__(self) -> Zygote:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()
