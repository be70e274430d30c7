"""Runs a program of tests/programs as the ranks of a torch.distributed job (gloo, one machine).

One process imports torch and forks the ranks of all jobs: that is most of what starting them costs.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from support import processes
from support.processes import Ended

_PLACE = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # what is told waits for no disk


class Killed(NamedTuple):
    """The rank that was killed, and how all ended."""

    victim: int
    ended: list[Ended]


class Server:
    """A process that imports modules once, and forks jobs."""

    def __init__(self, *modules: str, variables: Mapping[str, str] | None = None) -> None:
        self._modules = modules
        self._variables = {"OMP_NUM_THREADS": "1", **(variables or {})}
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def start(self, request: dict[str, object]) -> int:
        """Return the process of a new job's launcher."""
        with self._lock:
            if self._process is None:
                words = ("-m", "support.ranks", *self._modules)
                self._process = processes.start(*words, variables=self._variables)
            stdin, stdout = self._process.stdin, self._process.stdout
            assert stdin is not None
            assert stdout is not None
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            answer = stdout.readline()
            assert answer, "the process that starts ranks died"
            return int(answer)

    def close(self) -> None:
        """End it, once its jobs are over."""
        if self._process is not None:
            self._process.communicate(timeout=60)


# What most of the programs import; `distribute_tensor` imports the compiler.
_server = Server(
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
)


class Job:
    """The processes of a job, which a test may wait for or kill."""

    def __init__(self, program: str, count: int, *args: object, server: Server = _server) -> None:
        self.count = count
        self.folder = Path(tempfile.mkdtemp(prefix="fastserial-ranks-", dir=_PLACE))
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._launcher = server.start(
            {
                "program": str(processes.program(program)),
                "count": count,
                "folder": str(self.folder),
                "args": [str(arg) for arg in args],
                "env": processes.environment({"OMP_NUM_THREADS": "1"}),
                "cwd": str(Path.cwd()),
            }
        )

    def pid(self, rank: int, timeout: float = 60) -> int:
        """Return the process of a rank, once it has one."""
        until = time.monotonic() + timeout
        while not (self.folder / f"{rank}.pid").exists():
            assert time.monotonic() < until, f"rank {rank} does not start"
            time.sleep(0.005)
        return int((self.folder / f"{rank}.pid").read_text())

    def out(self, rank: int) -> str:
        """Return what a rank has printed by now."""
        path = self.folder / f"{rank}.out"
        return path.read_text() if path.exists() else ""

    def await_text(self, text: str, timeout: float = 60) -> None:
        """Wait until all ranks have printed something."""
        until = time.monotonic() + timeout
        while not all(text in self.out(rank) for rank in range(self.count)):
            if (self.folder / "codes").exists() or time.monotonic() > until:
                raise AssertionError(f"{text!r} is not printed: {self.wait(0)}")
            time.sleep(0.005)

    def kill_somewhere(
        self, first: Path, chance: random.Random, timeout: float, within: float = 1
    ) -> Killed:
        """Kill some rank soon after a save has made its file `first`; wait for all.

        Args:
            timeout: in which all ranks end (seconds).
            within: in which the rank is killed (seconds).
        """
        try:
            until = time.monotonic() + 60
            while not first.exists():
                assert time.monotonic() < until, "no save comes to its end"
                time.sleep(0.01)
            time.sleep(within * chance.random())
            victim = chance.randrange(self.count)
            self.kill(victim)
        finally:
            ended = self.wait(timeout)
        assert ended[victim].code == -9, ended
        return Killed(victim, ended)

    def kill(self, rank: int) -> None:
        """End a rank without a word."""
        os.kill(self.pid(rank), signal.SIGKILL)

    def wait(self, timeout: float = 240) -> list[Ended]:
        """Wait for all ranks; none is left behind, whatever happens."""
        until = time.monotonic() + timeout
        try:
            while not (self.folder / "codes").exists():
                if time.monotonic() > until:
                    texts = [path.read_text()[-2000:] for path in sorted(self.folder.glob("*.err"))]
                    raise AssertionError("the ranks hang:\n" + "\n".join(texts))
                time.sleep(0.005)
            codes = json.loads((self.folder / "codes").read_text())
            return [
                Ended(
                    codes[rank],
                    (self.folder / f"{rank}.out").read_text(),
                    (self.folder / f"{rank}.err").read_text(),
                )
                for rank in range(self.count)
            ]
        finally:
            if not (self.folder / "codes").exists():
                for process in [self._launcher, *map(_number, self.folder.glob("*.pid"))]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)


def run(program: str, count: int, *args: object, timeout: float = 240) -> list[str]:
    """Run a program on `count` ranks and return what each printed.

    Raises:
        AssertionError: a rank failed.
    """
    ended = Job(program, count, *args).wait(timeout)
    text = "\n".join(
        f"rank {rank} ended with {end.code}:\n{end.out[-4000:]}\n{end.err[-4000:]}"
        for rank, end in enumerate(ended)
    )
    assert all(end.code == 0 for end in ended), text
    return [end.out for end in ended]


def join(backend: str = "gloo", **options: Any) -> tuple[int, int]:
    """Make this process one of the job's ranks; return its rank and their number."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["FASTSERIAL_TEST_STORE"], count)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, **options)
    return rank, count


def alone(step: Callable[[], object]) -> None:
    """Let rank 0 do something before the others go on."""
    dist.barrier()
    if dist.get_rank() == 0:
        step()
    dist.barrier()


def each(cases: Iterable[Callable[[], object]]) -> None:
    """Run one case after the other: so each also shows that the group can be used after it."""
    for case in cases:
        dist.barrier()
        print(case.__name__, flush=True)
        case()


def main(scenes: Mapping[str, Any]) -> None:
    """Join, and run the scene that the command line names, with the words behind it."""
    join()
    name, *words = sys.argv[1:]
    scenes[name](*words)


def _number(path: Path) -> int:
    return int(path.read_text())


def _serve(modules: list[str]) -> None:
    """Fork a launcher for each request (JSON, one a line), and tell its process."""
    for name in modules:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the launchers
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid:
            print(pid, flush=True)
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(request["env"])
        os.chdir(request["cwd"])
        folder = Path(request["folder"])
        _launch(request["program"], request["count"], folder, request["args"])
        os._exit(0)


def _launch(program: str, count: int, folder: Path, args: list[str]) -> None:
    """Fork the ranks and wait for them."""
    pids = [_fork(program, rank, count, folder, args) for rank in range(count)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    (folder / "codes.new").write_text(json.dumps(codes))
    (folder / "codes.new").rename(folder / "codes")


def _fork(program: str, rank: int, count: int, folder: Path, args: list[str]) -> int:
    pid = os.fork()
    if pid:
        name = folder / f"{rank}.pid"
        name.with_suffix(".new").write_text(str(pid))
        name.with_suffix(".new").rename(name)
        return pid
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the requests are the server's
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(count),
        "FASTSERIAL_TEST_STORE": str(folder / "store"),
    }
    for fd, end in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{rank}.{end}", os.O_WRONLY | os.O_CREAT, 0o600), fd)
    code = 1
    try:
        sys.argv = [program, *args]
        runpy.run_path(program, run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1:])
