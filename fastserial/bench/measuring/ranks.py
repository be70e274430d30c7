"""Runs a program as the ranks of a job on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fastserial.bench.measuring.errors import BenchError

__all__ = ["MARK", "run_ranks"]

MARK = "@fastserial "  # begins the line that holds the results
_STDERR_SHOWN = 3000  # characters
_POLL = 0.1  # seconds


def run_ranks(module: str, argument: str, world: int) -> str:
    """Run a module as `world` processes; return what rank 0 printed behind `MARK`.

    Args:
        argument: of each process, whose rank is in its environment as `torchrun` would put it.

    Raises:
        BenchError: a rank failed, with the end of what it wrote to standard error.
    """
    command = [sys.executable, "-m", module, argument]
    with tempfile.TemporaryDirectory() as logs:
        names = [os.path.join(logs, str(rank)) for rank in range(world)]
        running = []
        port = str(_free_port())
        for rank, name in enumerate(names):
            with open(f"{name}.out", "wb") as out, open(f"{name}.err", "wb") as err:
                environment = _environment(rank, world, port)
                running.append(subprocess.Popen(command, env=environment, stdout=out, stderr=err))
        try:
            failed = _first_failure(running)
        finally:
            for process in running:
                process.kill()
                process.wait()
        if failed is not None:
            rank, code = failed
            text = Path(f"{names[rank]}.err").read_text(errors="replace").strip()
            raise BenchError(f"rank {rank} ended with {code}: …{text[-_STDERR_SHOWN:]}")
        for line in Path(f"{names[0]}.out").read_text(errors="replace").splitlines():
            if line.startswith(MARK):
                return line[len(MARK) :]
    raise BenchError("rank 0 printed no results")


def _first_failure(running: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int] | None:
    """Wait for all ranks; return rank and status of the first that fails, as soon as it does.

    The others would wait for it for half an hour.
    """
    while True:
        codes = [process.poll() for process in running]
        for rank, code in enumerate(codes):
            if code:
                return rank, code
        if None not in codes:
            return None
        time.sleep(_POLL)


def _environment(rank: int, world: int, port: str) -> dict[str, str]:
    threads = max(1, len(os.sched_getaffinity(0)) // world)
    return {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
