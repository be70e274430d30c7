"""What the engine `io_uring` does beside the conformance suite (in `test_engines.py`)."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.transfers import BLOCK, drive, noise, read, write

from fastserial.engines import Engine, Op, Request, io_uring
from fastserial.engines.io_uring import IoUringEngine
from fastserial.memory.buffers import BufferPool

_MISSING = IoUringEngine.unavailable()
_needs = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))
DEPTH = 4


class Opened:
    """An engine, its buffers, and a file open for direct I/O."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        self.engine: Engine = IoUringEngine()
        self.pool: BufferPool = self.engine.allocate(DEPTH, BLOCK)
        self.engine.open(self.pool.buffers, DEPTH)

    def writes(self, data: bytes) -> list[Request]:
        return [write(self.fd, at, data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]

    def close(self) -> None:
        self.engine.close()
        self.pool.close()
        os.close(self.fd)


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests the kernel had when a ring was freed, for each ring."""
    found: list[int] = []
    close = io_uring._IoRing.close

    def note(ring: Any) -> None:
        found.append(ring.in_flight)
        close(ring)

    monkeypatch.setattr(io_uring._IoRing, "close", note)
    return found


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    found = Opened(tmp_path / "file")
    yield found
    found.close()


@_needs
@pytest.mark.parametrize(
    "become",
    [
        lambda result: result // 2 // 4096 * 4096,
        lambda result: 0,
        lambda result: -errno.EINTR,
        lambda result: -errno.EAGAIN,
        lambda result: -errno.ECANCELED,
    ],
    ids=["half", "nothing", "EINTR", "EAGAIN", "ECANCELED"],
)
def test_what_the_kernel_leaves_is_moved(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, become: Callable[[int], int]
) -> None:
    """A short transfer, or one that was broken off, is completed; what it left is garbage here."""
    reap = io_uring._IoRing.reap
    changed: list[int] = []

    def less(ring: Any) -> tuple[int, int]:
        key, result = reap(ring)
        request, _ = opened.engine._under_way[key]  # type: ignore[attr-defined]
        now = become(result)
        if request.op is Op.WRITE:
            os.truncate(opened.path, request.offset + max(0, now))
        else:
            request.view[max(0, now) :] = bytes(request.length - max(0, now))
        changed.append(now)
        return key, now

    data = noise(BLOCK)
    monkeypatch.setattr(io_uring._IoRing, "reap", less)
    (completion,) = drive(opened.engine, opened.pool, opened.writes(data))
    assert (completion.error, completion.transferred) == (None, BLOCK)
    assert opened.path.read_bytes() == data
    (completion,) = drive(opened.engine, opened.pool, [read(opened.fd, 0, BLOCK)])
    assert (completion.error, completion.transferred) == (None, BLOCK)
    assert completion.request.tag == data
    assert len(changed) == 2


class Interrupted(BaseException):
    """What a signal handler raises."""


@_needs
def test_a_handler_that_raises_leaves_nothing_in_flight(tmp_path: Path, left: list[int]) -> None:
    """Wherever it came: after `close` the memory may go, and the file may be cut."""
    raised, data = 0, noise(64 * BLOCK)

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for tenth in range(60):
            opened = Opened(tmp_path / "file")
            requests = opened.writes(data)
            with contextlib.suppress(Interrupted):  # when all is written, in a slow run
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0001 * (tenth + 1))
                    drive(opened.engine, opened.pool, requests)
                except Interrupted:
                    raised += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
            opened.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert raised > 5
    assert left == [0] * 60
