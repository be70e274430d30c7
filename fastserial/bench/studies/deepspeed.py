"""`fastserial bench deepspeed`: checkpoints of a DeepSpeed run, by stock, by its writer, by us.

The third micro-benchmark of FastPersist (DeepSpeedExamples' `deepspeed_save_model.py`).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.scratch import scratch
from fastserial.bench.studies.deepspeed_plan import MARK, DeepSpeedBench, RowResult

__all__ = ["run_deepspeed"]

_WORKER = "fastserial.bench.studies.deepspeed_worker"
_STDERR_SHOWN = 3000  # characters
_POLL = 0.1  # seconds


def run_deepspeed(bench: DeepSpeedBench) -> list[RowResult]:
    """Run the benchmark.

    Raises:
        BenchError: DeepSpeed is missing, or a rank failed.
    """
    from fastserial import engines

    lacks = next(status.missing for status in engines.survey() if status.name == "deepspeed")
    if lacks is not None and "DeepSpeed is not installed" in lacks:
        raise BenchError("DeepSpeed is not installed: pip install 'fastserial[deepspeed]'")
    with scratch(Path(bench.folder), 0) as folder:
        engine = None if lacks is not None else "deepspeed"
        return _launch(replace(bench, folder=str(folder), engine=engine))


def _launch(bench: DeepSpeedBench) -> list[RowResult]:
    command = [sys.executable, "-m", _WORKER, json.dumps(asdict(bench))]
    with tempfile.TemporaryDirectory() as logs:
        names = [os.path.join(logs, str(rank)) for rank in range(bench.world_size)]
        running = []
        port = str(_free_port())
        for rank, name in enumerate(names):
            with open(f"{name}.out", "wb") as out, open(f"{name}.err", "wb") as err:
                environment = _environment(rank, bench.world_size, port)
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
        return _results(Path(f"{names[0]}.out").read_text(errors="replace").splitlines())


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


def _results(lines: Iterable[str]) -> list[RowResult]:
    for line in lines:
        if line.startswith(MARK):
            return [RowResult(**row) for row in json.loads(line[len(MARK) :])]
    raise BenchError("rank 0 printed no results")


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
