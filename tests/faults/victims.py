"""Processes that save over and over until something happens to them.

A zygote imports torch and fastserial once and forks a victim for each trial. A victim writes
`start N` and `done N` around each save, or `error ...`, to its log.

    python victims.py        # the zygote: one JSON job per line on stdin, one answer on stdout
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from support import processes

__all__ = ["Victim", "Zygote"]

_PATIENCE = 60.0
_SMALL_FILE = 1 << 20  # states of a few MiB go the way of large ones


@dataclass
class Victim:
    """A process that saves."""

    pid: int
    path: str
    log: Path
    zygote: Zygote

    def lines(self) -> list[str]:
        return self.log.read_text(encoding="utf-8").splitlines()

    def last(self, word: str) -> int | None:
        """Return the number of the last save that has started (`start`) or returned (`done`)."""
        numbers = [int(line.split()[1]) for line in self.lines() if line.startswith(word + " ")]
        return numbers[-1] if numbers else None

    def is_saving(self) -> bool:
        """Whether the last save that has started has not returned."""
        return self.last("start") != self.last("done")

    def await_line(self, word: str) -> None:
        """Wait until the victim's log has a line that starts with `word`."""
        deadline = time.monotonic() + _PATIENCE
        while not any(line.startswith(word) for line in self.lines()):
            assert time.monotonic() < deadline, f"no {word!r} from the victim: {self.lines()}"
            time.sleep(0.0005)

    def resume(self) -> None:
        """Let a victim that was started with `pause` go on."""
        os.kill(self.pid, signal.SIGUSR1)

    def error(self) -> dict[str, Any]:
        """Return what the victim's save raised."""
        return self._last_json("error")

    def report(self) -> dict[str, Any]:
        """Return the report of the victim's last save."""
        return self._last_json("report")

    def _last_json(self, word: str) -> dict[str, Any]:
        lines = [line for line in self.lines() if line.startswith(word + " ")]
        found: dict[str, Any] = json.loads(lines[-1].removeprefix(word))
        return found

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Wait for its end and return the exit status, negative for a signal."""
        return int(self.zygote.ask({"wait": self.pid}))


class Zygote:
    """The parent of the victims, in a process of its own."""

    def __init__(self, preload: str | None = None) -> None:
        variables = {} if preload is None else {"LD_PRELOAD": preload}
        self._process = processes.start(__file__, variables=variables)
        self._logs = Path(f"/dev/shm/fastserial-victims-{self._process.pid}")
        self._logs.mkdir()
        self._count = 0

    def start(self, path: str | os.PathLike[str], first: int, count: int, **job: Any) -> Victim:
        """Start a victim that saves states `first`, `first + 1`, ... to a path.

        Other keywords: `nbytes` of a state, `zipped`, `options` of fastserial, `named` to use a
        named temporary file, `pause` to wait for `resume` before the first save, `fsize` for a
        limit on the size of files (bytes), `user` to run as, `report` to log the SaveReport,
        `remove` for a folder that disappears in the middle of the save.

        For controls: `unguarded` overwrites the target where it is (the victim holds it open),
        `deaf` takes every write for a whole one.
        """
        self._count += 1
        log = self._logs / f"{self._count}.log"
        log.touch()
        request = {"path": os.fspath(path), "first": first, "count": count, "log": str(log), **job}
        return Victim(int(self.ask(request)), os.fspath(path), log, self)

    def ask(self, request: dict[str, Any]) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        answer = stdout.readline()
        assert answer, "the zygote died"
        return json.loads(answer)

    def __enter__(self) -> Zygote:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait(_PATIENCE)
        for file in self._logs.iterdir():
            file.unlink()
        self._logs.rmdir()


def _serve() -> None:
    import torch

    import fastserial

    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    fastserial.install()
    _warm_up(torch)
    for line in sys.stdin:
        job = json.loads(line)
        if "wait" in job:
            _, status = os.waitpid(job["wait"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                os._exit(_suffer(job))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _warm_up(torch: Any) -> None:
    """Save once in each way, so that what the first save imports is there."""
    from states import make

    from fastserial import options

    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        options(small_file=_SMALL_FILE, cache="drop"),
    ):
        for nbytes in (4_000, 3_000_000):
            for zipped in (True, False):
                path = os.path.join(folder, "x.pt")
                torch.save(make(1, nbytes), path, _use_new_zipfile_serialization=zipped)


def _take_every_write_for_a_whole_one() -> None:
    pwrite = os.pwrite

    def deaf_pwrite(fd: int, data: memoryview, offset: int) -> int:
        pwrite(fd, data, offset)
        return len(data)

    os.pwrite = deaf_pwrite


def _suffer(job: dict[str, Any]) -> int:
    import torch
    from states import make

    from fastserial import last_save_report, options
    from fastserial.files import replacement

    log = os.open(job["log"], os.O_WRONLY | os.O_APPEND)

    def tell(text: str) -> None:
        os.write(log, f"{text}\n".encode())

    if job.get("named"):
        replacement._can_link = lambda: False
    if "fsize" in job:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["fsize"], resource.RLIM_INFINITY))
    if "user" in job:
        os.setgid(job["user"])
        os.setuid(job["user"])
    if job.get("deaf"):
        _take_every_write_for_a_whole_one()
    if "remove" in job:
        real = replacement.Replacement.sync

        def sync(self: replacement.Replacement) -> None:
            real(self)
            shutil.rmtree(job["remove"])

        replacement.Replacement.sync = sync
    unguarded = job.get("unguarded", False)
    state = make(job["first"], job["nbytes"])
    if job.get("pause"):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        tell("ready")
        signal.sigwait([signal.SIGUSR1])
    for number in range(job["first"], job["first"] + job["count"]):
        if number != job["first"]:
            state = make(number, job["nbytes"])
        tell(f"start {number}")
        try:
            chosen = {"small_file": _SMALL_FILE, "cache": "drop", **job.get("options", {})}
            path: Any = contextlib.nullcontext(job["path"])
            # a file object of the caller's is overwritten
            with options(**chosen), open(job["path"], "wb") if unguarded else path as place:
                torch.save(state, place, _use_new_zipfile_serialization=job.get("zipped", True))
        except Exception as error:
            kinds = ",".join(kind.__name__ for kind in type(error).__mro__)
            tell(
                "error "
                + json.dumps(
                    {
                        "kinds": kinds,
                        "errno": getattr(error, "errno", None),
                        "filename": getattr(error, "filename", None),
                        "text": str(error),
                        "cause": type(error.__cause__).__name__,
                        "needed": getattr(error, "bytes_needed", None),
                        "free": getattr(error, "bytes_free", None),
                    }
                )
            )
            return 3
        tell(f"done {number}")
        if job.get("report"):
            report = last_save_report()
            tell("report " + json.dumps(report.to_dict() if report else None))
    return 0


if __name__ == "__main__":
    _serve()
