"""The engine `deepspeed` moves blocks by DeepSpeed's threads, and loses none when they do."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run
from support.transfers import BLOCK, drive, write

import fastserial
from fastserial.engines.deepspeed import aio_op
from fastserial.engines.deepspeed import engine as engine_module
from fastserial.engines.deepspeed.aio_op import AioSettings
from fastserial.engines.deepspeed.engine import DeepSpeedEngine
from fastserial.errors import WriteError

MIB = 1 << 20


class Spy:
    """A handle that counts, and may lose what it is given: it then says that all is well."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.writes = self.waits = 0
        self.lose = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name)

    def async_pwrite(self, *arguments: Any) -> int:
        self.writes += 1
        return 0 if self.lose else self.handle.async_pwrite(*arguments)

    def wait(self) -> int:
        self.waits += 1
        return 0 if self.lose else self.handle.wait()


@pytest.fixture
def spies(monkeypatch: pytest.MonkeyPatch) -> list[Spy]:
    """The handles of the engines that a test makes."""
    found: list[Spy] = []
    borrow = aio_op.borrow_handle

    def spying(settings: AioSettings) -> Spy:
        found.append(Spy(borrow(settings)))
        return found[-1]

    def back(settings: AioSettings, spy: Spy) -> None:
        aio_op.give_back(settings, spy.handle)

    monkeypatch.setattr(engine_module, "borrow_handle", spying)
    monkeypatch.setattr(engine_module, "give_back", back)
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


def test_deepspeed_moves_them(
    spies: list[Spy], opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """All blocks, with both handles in turn, and none a second time."""
    engine, pool, fd, path = opened
    data = os.urandom(12 * BLOCK)
    for completion in drive(engine, pool, parts(fd, data)):
        assert completion.error is None
    assert [spy.writes for spy in spies] == [6, 6]
    assert path.read_bytes() == data
    assert "lost" not in caplog.text


@pytest.mark.parametrize("reserve", [False, True])
def test_lost_writes_are_done_again(
    spies: list[Spy], opened: Any, reserve: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine, pool, fd, path = opened
    data = os.urandom(8 * BLOCK)
    if reserve:
        os.posix_fallocate(fd, 0, len(data))
    spies[1].lose = True
    with caplog.at_level(logging.WARNING, "fastserial"):
        for completion in drive(engine, pool, parts(fd, data)):
            assert (completion.error, completion.transferred) == (None, BLOCK)
    assert spies[1].writes == 4
    assert caplog.text.count("DeepSpeed lost a write") == 4
    assert path.read_bytes() == data


def test_what_cannot_be_proven_goes_by_plain_calls(spies: list[Spy], opened: Any) -> None:
    """Onto existing data; to a descriptor of the page cache; a length DeepSpeed cannot divide."""
    engine, pool, fd, path = opened
    data = os.urandom(2 * BLOCK)
    path.write_bytes(data)
    os.sync()
    drive(engine, pool, parts(fd, data[::-1]))
    assert path.read_bytes() == data[::-1]
    cached = os.open(path, os.O_RDWR)
    drive(engine, pool, [write(cached, 2 * BLOCK, data[:BLOCK])])
    os.close(cached)
    drive(engine, pool, [write(fd, 3 * BLOCK, data[:4096])])
    assert [spy.writes for spy in spies] == [0, 0]
    assert path.read_bytes() == data[::-1] + data[:BLOCK] + data[:4096]


def test_a_rest_follows(spies: list[Spy], opened: Any) -> None:
    """What the threads cannot share evenly is written after their part."""
    engine, pool, fd, path = opened
    data = os.urandom(7 * 4096)
    (completion,) = drive(engine, pool, [write(fd, 0, data)])
    assert (completion.error, completion.transferred) == (None, len(data))
    assert sum(spy.writes for spy in spies) == 1
    assert path.read_bytes() == data


def test_handles_are_kept_for_the_next_file(op: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeing one takes long."""
    settings = AioSettings(block_size=128 * 1024, intra_op_parallelism=1)
    first = aio_op.borrow_handle(settings)
    aio_op.give_back(settings, first)
    monkeypatch.setattr(aio_op, "load_op", lambda: pytest.fail("a second handle was made"))
    assert aio_op.borrow_handle(settings) is first


def save(path: Path, nbytes: int, **options: Any) -> Any:
    """Save with the engine, and return what the save says of itself."""
    tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    fastserial.install()
    try:
        with fastserial.options(engine="deepspeed", block_size=65536, small_file=0, **options):
            torch.save(tensor, path)
    finally:
        fastserial.uninstall()
    assert torch.equal(torch.load(path), tensor)
    return fastserial.last_save_report()


@pytest.mark.parametrize("preallocate", [True, False])
def test_full_disk(small_disk: Path, preallocate: bool) -> None:
    """ENOSPC, the old file, and no rest of the new one."""
    path = small_disk / "a.pt"
    report = save(path, 4 * MIB, preallocate=preallocate)
    assert (report.engine, report.direct) == ("deepspeed", True)
    before = path.read_bytes()
    with pytest.raises(WriteError) as caught:
        save(path, 60 * MIB, preallocate=preallocate)
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == before
    assert set(os.listdir(small_disk)) == {"a.pt", "lost+found"}


def test_large_sectors(large_sectors: Path, spies: list[Spy]) -> None:
    """Only requests that the device takes, so that none is lost."""
    report = save(large_sectors / "a.pt", 5 * MIB + 77)
    assert (report.engine, report.direct) == ("deepspeed", True)
    assert sum(spy.writes for spy in spies) > 70


@pytest.mark.parametrize(("kib", "expected"), [(4096, "8"), (900, "2"), (0, "ulimit -l 256")])
def test_little_memory_may_be_locked(op: Any, kib: int, expected: str) -> None:
    """Fewer buffers, or an error that says what to do; DeepSpeed's allocator would abort."""
    assert expected in run("little_locked_memory", kib * 1024).out


@pytest.mark.filterwarnings("ignore")
def test_fork(op: Any, tmp_path: Path) -> None:
    """A child saves and ends; the handles' threads are its parent's."""
    run("fork_with_deepspeed", tmp_path)


def test_interrupted(spies: list[Spy], opened: Any, make_handle: Callable[..., Any]) -> None:
    """An interrupt while a block is prepared leaves nothing in flight after `close`."""
    engine, pool, fd, path = opened
    requests = parts(fd, b"a" * (3 * BLOCK))

    def interrupt(request: Any) -> None:
        raise KeyboardInterrupt

    requests[2].prepare = interrupt
    for request in requests:
        request.buffer = pool.take()
    with pytest.raises(KeyboardInterrupt):
        engine.submit(requests)
    engine.close()
    assert sum(spy.writes for spy in spies) == 2
    assert sum(spy.waits for spy in spies) == 1
    assert path.read_bytes() == b"a" * (2 * BLOCK)
