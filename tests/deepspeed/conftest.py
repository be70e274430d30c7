"""Needs DeepSpeed; what needs its compiled `async_io` op says what is missing otherwise."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from said import Launch, Said, parsed
from support import processes, ranks

from fastserial.engines.deepspeed.aio_op import load_op, missing

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(processes.program("train").parent))  # some import it
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


@pytest.fixture(scope="session")
def launch() -> Iterator[Launch]:
    """Runs `train` on one or two ranks, to this exit status, and returns what they said."""
    server = ranks.Server("deepspeed")

    def run(world: int, *arguments: object, code: int = 0) -> Said:
        return parsed(ranks.Job("train", world, *arguments, server=server).wait(), code)

    yield run
    server.close()
