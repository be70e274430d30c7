"""What tests of saves beside the program share."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

import fastserial
from fastserial.engines import Request
from fastserial.engines.threads import ThreadsEngine
from fastserial.overlap import pending


class Gate:
    """Lets the first block of a save through, and stops the saving thread before the second.

    With `seconds` for so long, each save anew; else until `open` is set.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self.stopped = threading.Event()
        self.open = threading.Event()

    def engine(self, threads: int) -> ThreadsEngine:
        gate = self
        if self.seconds is not None:
            self.open = threading.Event()

        class Gated(ThreadsEngine):
            name = "gated"
            blocks = 0

            def submit(self, requests: Sequence[Request]) -> None:
                for request in requests:
                    if self.blocks == 1:
                        gate.stopped.set()
                        assert gate.open.wait(gate.seconds or 60) or gate.seconds
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
def nothing_left() -> Iterator[None]:
    yield
    for save in list(pending._pending):
        save.exception(60)
    assert not pending._pending
    left = list(pending._failed)
    pending._failed.clear()
    assert not left, "an error that nobody asked for"
