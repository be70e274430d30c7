"""Saves beside the program: short runs by default, with `FASTSERIAL_FAULTS=full` the long ones."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import fastserial
from fastserial.engines import Request
from fastserial.engines.threads import ThreadsEngine
from fastserial.overlap import guard, pending

FULL = os.environ.get("FASTSERIAL_FAULTS", "") == "full"


@pytest.fixture
def trials(request: pytest.FixtureRequest) -> int:
    """How many: `@pytest.mark.trials(short, full)`."""
    short, full = request.node.get_closest_marker("trials").args
    return int(full if FULL else short)


@pytest.fixture
def dice(request: pytest.FixtureRequest) -> random.Random:
    return random.Random(request.node.name)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "trials(short, full): number of trials")


class Gate:
    """Lets the first block of a save through, and stops the saving thread before the second."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self.open = threading.Event()

    def engine(self, threads: int) -> ThreadsEngine:
        gate = self

        class Gated(ThreadsEngine):
            name = "gated"
            blocks = 0

            def submit(self, requests: Sequence[Request]) -> None:
                for request in requests:
                    if self.blocks == 1:
                        gate.stopped.set()
                        assert gate.open.wait(60)
                    self.blocks += 1
                    super().submit([request])

        return Gated(threads, True)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """Saves stop in their middle until `gate.open.set()`."""
    made = Gate()
    with fastserial.options(
        engine=made.engine, small_file=0, block_size=65536, queue_depth=1, durable=False
    ):
        yield made
    made.open.set()


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    with pytest.MonkeyPatch.context():
        for save in list(pending._pending.values()):
            save.exception(60)
    assert not pending._pending
    left, pending._failed = dict(pending._failed), {}
    assert not left, "an error that nobody asked for"
    guard.tidy()
    assert not guard.is_registered()


@pytest.fixture
def state() -> dict[str, Any]:
    """About 2 MB, larger and smaller tensors, and what is no tensor."""
    torch.manual_seed(5)
    return {
        "weights": [torch.randn(100_000) for _ in range(5)],
        "small": [torch.randn(7) for _ in range(9)],
        "step": 3,
    }


Change = Callable[[dict[str, Any]], object]
