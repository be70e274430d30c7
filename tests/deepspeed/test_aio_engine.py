"""The engine `deepspeed` moves blocks by DeepSpeed's threads, and loses none when they do."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from support.processes import run
from support.transfers import BLOCK, drive, write

from fastserial.engines.deepspeed import aio_op
from fastserial.engines.deepspeed.aio_op import AioSettings
from fastserial.engines.deepspeed.engine import DeepSpeedEngine

MIB = 1 << 20


class Spy:
    """Handles that count what they are given, and may lose it: they then say that all is well."""

    def __init__(self, handle: Any, totals: Totals) -> None:
        self.handle = handle
        self.totals = totals

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name)

    def async_pwrite(self, *arguments: Any) -> int:
        self.totals.writes += 1
        self.lost = self.totals.writes % 2 == 0 and self.totals.lose
        return 0 if self.lost else self.handle.async_pwrite(*arguments)

    def wait(self) -> int:
        self.totals.waits += 1
        return 0 if self.lost else self.handle.wait()


class Totals:
    """Of all handles together. `lose`: every second write."""

    writes = waits = 0
    lose = False


@pytest.fixture
def totals(monkeypatch: pytest.MonkeyPatch) -> Totals:
    """Of the handles of the engines that a test makes."""
    found = Totals()
    borrow, back = aio_op.borrow_handle, aio_op.give_back
    monkeypatch.setattr(aio_op, "borrow_handle", lambda one: Spy(borrow(one), found))
    monkeypatch.setattr(aio_op, "give_back", lambda one, spy: back(one, spy.handle))
    return found


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    """An engine, its pool, and a file opened for direct I/O."""
    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    engine = DeepSpeedEngine(2)
    pool = engine.allocate(4, BLOCK)
    engine.open(pool.buffers, len(pool.buffers))
    yield engine, pool, fd, path
    engine.close()
    pool.close()
    os.close(fd)


def parts(fd: int, data: bytes) -> list[Any]:
    return [write(fd, at, data[at : at + BLOCK]) for at in range(0, len(data), BLOCK)]


@pytest.mark.parametrize("lose", [False, True])
@pytest.mark.parametrize("reserve", [False, True])
def test_deepspeed_moves_them(
    totals: Totals, opened: Any, reserve: bool, lose: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """All blocks, and those that it lost a second time, by plain calls."""
    engine, pool, fd, path = opened
    data = os.urandom(12 * BLOCK)
    if reserve:
        os.posix_fallocate(fd, 0, len(data))
    totals.lose = lose
    with caplog.at_level(logging.WARNING, "fastserial"):
        for completion in drive(engine, pool, parts(fd, data)):
            assert (completion.error, completion.transferred) == (None, BLOCK)
    assert (totals.writes, totals.waits) == (12, 12)
    assert caplog.text.count("DeepSpeed lost a write") == 6 * lose
    assert path.read_bytes() == data


def test_what_cannot_be_proven_goes_by_plain_calls(totals: Totals, opened: Any) -> None:
    """Onto existing data; to a descriptor of the page cache."""
    engine, pool, fd, path = opened
    data = os.urandom(2 * BLOCK)
    path.write_bytes(data)
    os.sync()
    drive(engine, pool, parts(fd, data[::-1]))
    assert path.read_bytes() == data[::-1]
    cached = os.open(path, os.O_RDWR)
    drive(engine, pool, [write(cached, 2 * BLOCK, data[:BLOCK])])
    os.close(cached)
    assert totals.writes == 0
    assert path.read_bytes() == data[::-1] + data[:BLOCK]


def test_handles_are_kept_for_the_next_file(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing one takes long."""
    settings = AioSettings(block_size=128 * 1024, intra_op_parallelism=1)
    first = aio_op.borrow_handle(settings)
    aio_op.give_back(settings, first)
    monkeypatch.setattr(aio_op, "load_op", lambda: pytest.fail("a second handle was made"))
    assert aio_op.borrow_handle(settings) is first


@pytest.mark.parametrize(("kib", "expected"), [(4096, "8"), (900, "2"), (0, "8 not locked")])
def test_little_memory_may_be_locked(op: Any, kib: int, expected: str) -> None:
    """Fewer buffers, or none that is locked; DeepSpeed's allocator would abort."""
    assert expected in run("little_locked_memory", kib * 1024).out


@pytest.mark.filterwarnings("ignore")
def test_fork(op: Any, tmp_path: Path) -> None:
    """A child saves and ends; the handles' threads are its parent's."""
    run("fork_with_deepspeed", tmp_path)
