"""A script as the ranks of a job on this machine, and what they do together.

Each rank is a process of its own; rank 0 of it prints the rows. Before each run nothing is left of
the one before, and no page is dirty; times are those of the slowest rank, from when all are ready.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from fastserial.bench import fio
from fastserial.bench.measure import BenchError, Sample, measure
from fastserial.bench.state import chill, settle

__all__ = [
    "WORKER",
    "Done",
    "best_fio",
    "everywhere",
    "finish",
    "fio_name",
    "fresh",
    "highest",
    "run_ranks",
    "slowest",
    "start",
]

WORKER = "--worker"  # the first argument of a process that is a rank; the second is JSON
_MARK = "@fastserial "  # begins the line that holds the rows
_TIMEOUT = timedelta(hours=1)  # while rank 0 looks for fio's best
_STDERR_SHOWN = 3000  # characters
_POLL = 0.1  # seconds


def run_ranks(script: str, argument: dict[str, Any], world: int) -> list[dict[str, Any]]:
    """Run a script as `world` processes; return the rows that rank 0 gave to `finish`.

    Raises:
        BenchError: a rank failed, with the end of what it wrote to standard error.
    """
    command = [sys.executable, script, WORKER, json.dumps(argument)]
    port = str(_free_port())
    with tempfile.TemporaryDirectory() as logs:
        names = [os.path.join(logs, str(rank)) for rank in range(world)]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for rank, name in enumerate(names):
                with open(f"{name}.out", "wb") as out, open(f"{name}.err", "wb") as err:
                    env = _environment(rank, world, port)
                    running.append(subprocess.Popen(command, env=env, stdout=out, stderr=err))
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
            if line.startswith(_MARK):
                found: list[dict[str, Any]] = json.loads(line[len(_MARK) :])
                return found
    raise BenchError("rank 0 printed no rows")


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


# -- in a rank -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Done:
    """What something took on one rank: seconds, peak of extra memory (bytes), what it returned."""

    seconds: float
    extra_bytes: int | None
    value: Any


def start() -> dict[str, Any]:
    """Join the job; return the argument of `run_ranks`."""
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    argument: dict[str, Any] = json.loads(sys.argv[2])
    return argument


def finish(rows: Sequence[dict[str, Any]]) -> NoReturn:
    """Let rank 0 print the rows, and end the process."""
    if dist.get_rank() == 0:
        sys.stdout.write(f"\n{_MARK}{json.dumps(rows)}\n")
        sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # stock DeepSpeed under ZeRO 3 now and then aborts while the interpreter ends


def fresh(folder: Path, pause: float) -> Path:
    """Return an empty folder, when nothing is left of the last run. Collective."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        settle(pause)
    dist.barrier()
    return folder


def everywhere(call: Callable[[], Any]) -> tuple[list[Done], str | None]:
    """Call on all ranks, timed from when all are ready; return what it took on each. Collective.

    Returns:
        What each rank did, and None; or nothing, and why a rank could not. `call` may return the
        seconds as an attribute `seconds`, if it knows better.
    """
    own = Done(0.0, None, None)
    problem = None
    spent: list[float] = []
    values: list[Any] = []

    def timed() -> None:
        dist.barrier()  # they get here one by one
        began = time.perf_counter()
        values.append(call())
        spent.append(time.perf_counter() - began)

    try:
        used = measure(timed)
        value = values[0]
        seconds = value.seconds if isinstance(value, Sample) else spent[0]
        own = Done(seconds, used.extra_bytes, None if isinstance(value, Sample) else value)
    except BaseException as error:  # DCP's CheckpointException is none of Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        problem = f"{type(error).__name__}: {error}"
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (own, problem))
    problem = next((text for _, text in found if text), None)
    return ([] if problem else [one for one, _ in found]), problem


def slowest(done: Sequence[Done]) -> float:
    """Return the seconds of the slowest rank."""
    return max(one.seconds for one in done)


def highest(known: int | None, done: Sequence[Done]) -> int | None:
    """Return the highest peak of memory of a row."""
    peaks = [one.extra_bytes for one in done if one.extra_bytes is not None]
    return max([*peaks, known or 0]) if peaks else None


# -- fio beside the ranks ------------------------------------------------------------------------


def fio_name(jobs: int) -> str:
    """Return the name of fio's row with as many jobs."""
    return f"fio, {jobs} job{'s' * (jobs > 1)}"


def best_fio(
    folder: Path, nbytes: int, jobs: int, pause: float
) -> tuple[fio.FioSettings, fio.FioSettings] | None:
    """Return fio's fastest settings to write and to read, None without fio. Collective."""
    found: list[Any] = [None]
    if dist.get_rank() == 0 and fio.installed():
        try:
            found = [_best(folder / "fio", nbytes, jobs, pause)]
        except BenchError:
            found = [None]
    dist.broadcast_object_list(found)
    best: tuple[fio.FioSettings, fio.FioSettings] | None = found[0]
    return best


def _best(path: Path, nbytes: int, jobs: int, pause: float) -> Any:
    def write(settings: fio.FioSettings) -> Sample:
        path.unlink(missing_ok=True)
        settle(pause)
        return fio.run_fio(settings, path, nbytes, jobs)

    def read(settings: fio.FioSettings) -> Sample:
        chill([path])
        return fio.read_file(settings, path, jobs)

    try:
        return fio.best(write), fio.best(read)
    finally:
        path.unlink(missing_ok=True)
