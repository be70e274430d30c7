"""What the engine `io_uring` does beside the conformance suite (in `test_engines.py`)."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run
from support.transfers import BLOCK, drive, into, noise, read, wait_for, write

import fastserial
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


@_needs
def test_an_error_is_the_request_s_own(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    reap = io_uring._IoRing.reap
    monkeypatch.setattr(io_uring._IoRing, "reap", lambda ring: (reap(ring)[0], -errno.EIO))
    (completion,) = drive(opened.engine, opened.pool, opened.writes(noise(BLOCK)))
    assert isinstance(completion.error, OSError)
    assert completion.error.errno == errno.EIO


@_needs
def test_signals_while_it_waits(opened: Opened) -> None:
    """A handler runs; the wait goes on."""
    seen: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, frame: seen.append(number))
    data = noise(256 * BLOCK)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        while len(seen) < 20:
            for completion in drive(opened.engine, opened.pool, opened.writes(data)):
                assert (completion.error, completion.transferred) == (None, BLOCK)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert opened.path.read_bytes() == data


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


@_needs
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_its_parent_s_requests_alone(opened: Opened) -> None:
    """The ring's memory is shared with it."""
    for _ in range(5):
        data = noise(DEPTH * BLOCK)
        requests = [into(opened.pool.take(), one) for one in opened.writes(data)]
        opened.engine.submit(requests)
        child = os.fork()
        if not child:
            try:
                opened.engine.close()
                mine = IoUringEngine()
                pool = mine.allocate(1, BLOCK)
                mine.open(pool.buffers, 1)
                own = write(opened.fd, DEPTH * BLOCK, data[:BLOCK])
                (completion,) = drive(mine, pool, [own])
                mine.close()
                os._exit(completion.error is not None)
            except BaseException:
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        finished = wait_for(opened.engine, DEPTH)
        assert [c.error for c in finished] == [None] * DEPTH
        assert opened.path.read_bytes() == data + data[:BLOCK]
        for completion in finished:
            opened.pool.give(completion.request.buffer)


@_needs
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("zip_format", [True, False])
def test_saves_and_loads(tmp_path: Path, direct: bool, zip_format: bool) -> None:
    """Byte for byte stock's file; and a load by the same engine."""
    torch.manual_seed(1)
    state = {f"t{i}": torch.randn(700_001 + i) for i in range(9)}
    form = {"_use_new_zipfile_serialization": zip_format}
    stock, fast = tmp_path / "stock" / "a.pt", tmp_path / "fast" / "a.pt"
    for path in (stock, fast):
        path.parent.mkdir()
    torch.save(state, stock, **form)
    fastserial.install()
    try:
        with fastserial.options(engine="io_uring", direct=direct, small_file=0, block_size=65536):
            torch.save(state, fast, **form)
            saved = fastserial.last_save_report()
            loaded = torch.load(fast)
            report = fastserial.last_load_report()
    finally:
        fastserial.uninstall()
    assert (saved.engine, saved.direct) == ("io_uring", direct)
    assert report.engine == "io_uring"
    assert fast.read_bytes() == stock.read_bytes()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter has its numbers of calls")
@pytest.mark.parametrize("call", ["io_uring_setup", "io_uring_enter"])
@pytest.mark.parametrize(
    ("number", "word"), [(errno.EPERM, "forbidden"), (errno.ENOSYS, "no io_uring")]
)
def test_where_it_is_forbidden(tmp_path: Path, call: str, number: int, word: str) -> None:
    """As in containers: the engine says so, and the usual one saves."""
    out = run("filtered_io_uring", call, number, tmp_path).out
    assert "'io_uring' cannot run here" in out
    assert word in out
