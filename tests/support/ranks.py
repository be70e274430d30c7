"""Runs a program of tests/programs as the ranks of a torch.distributed job (gloo, one machine)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

__all__ = ["Ended", "Job", "join", "run"]

_TESTS = Path(__file__).resolve().parent.parent


@dataclass
class Ended:
    """A rank's process that has ended."""

    code: int
    out: str
    err: str


class Job:
    """The processes of a job, which a test may wait for or kill."""

    def __init__(self, program: str, count: int, *args: object) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fastserial-ranks-")
        folder = Path(self._folder.name)
        self._files = [(folder / f"{rank}.out", folder / f"{rank}.err") for rank in range(count)]
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank, (out, err) in enumerate(self._files):
            env = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "FASTSERIAL_TEST_STORE": str(folder / "store"),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(_TESTS),
            }
            command = [sys.executable, str(_TESTS / "programs" / f"{program}.py"), *map(str, args)]
            with out.open("wb") as stdout, err.open("wb") as stderr:
                self.processes.append(
                    subprocess.Popen(command, env=env, stdout=stdout, stderr=stderr)
                )

    def wait(self, timeout: float = 240) -> list[Ended]:
        """Wait for all ranks; none is left behind, whatever happens."""
        try:
            for process in self.processes:
                process.wait(timeout)
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
            ended = [
                Ended(process.returncode, out.read_text(), err.read_text())
                for process, (out, err) in zip(self.processes, self._files, strict=True)
            ]
            self._folder.cleanup()
        return ended


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


def join() -> tuple[int, int]:
    """Make this process one of the job's ranks; return its rank and their number."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(os.environ["FASTSERIAL_TEST_STORE"], count)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    return rank, count
