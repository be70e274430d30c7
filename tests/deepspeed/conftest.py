"""Needs DeepSpeed; what needs its compiled `async_io` op says what is missing otherwise."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import processes

from fastserial.engines.deepspeed.aio_op import load_op, missing

os.environ.setdefault("DS_ACCELERATOR", "cpu")
# The others import it. `test_available` says why they are not there.
if any("DeepSpeed is not installed" in lack for lack in missing()):
    _names = os.listdir(os.path.dirname(__file__))
    collect_ignore = [name for name in _names if name != "test_available.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(here):
            # DeepSpeed warns of itself
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def op() -> Any:
    """DeepSpeed's compiled op."""
    lacks = missing()
    if lacks:
        pytest.skip("; ".join(lacks))
    return load_op()


@pytest.fixture
def make_handle(op: Any) -> Callable[..., Any]:
    """Makes an `aio_handle` of small blocks."""

    def make(parallelism: int = 2) -> Any:
        return op.aio_handle(64 * 1024, 8, False, True, parallelism)

    return make


def free_port() -> int:
    """Return a port that nobody uses, and that the kernel gives nobody who asks for any."""
    while True:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


@pytest.fixture(scope="session")
def launch() -> Callable[..., list[dict[str, Any]]]:
    """Runs a program on one or two ranks and returns what they said."""

    def run(
        world: int, *arguments: object, program: str = "train.py", **variables: str
    ) -> list[dict[str, Any]]:
        shared = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        words = (Path(__file__).with_name(program), *arguments)
        running = [
            processes.start(
                *words,
                variables={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stderr=subprocess.PIPE,
            )
            for rank in range(world)
        ]
        said: list[dict[str, Any]] = []
        try:
            for rank, process in enumerate(running):
                out, err = process.communicate(timeout=240)
                said += [json.loads(line[1:]) for line in out.splitlines() if line[:1] == "@"]
                said.append({"rank": rank, "exit": process.returncode, "stderr": err[-4000:]})
        finally:
            for process in running:
                if process.returncode is None:
                    process.kill()
                    process.communicate()
        return said

    return run
