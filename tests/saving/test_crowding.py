"""One large block where another thread keeps the interpreter's lock; the file is the same."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.spinning import spinning

import fastserial
from fastserial.config import MAX_BLOCK
from fastserial.config.performance import SWITCH_INTERVAL
from fastserial.engines import Completion, Request
from fastserial.engines.threads import ThreadsEngine
from fastserial.memory.buffers import BufferPool
from fastserial.memory.held_settings import quick_switches
from fastserial.saving import crowding

MIB = 1024 * 1024
serve = ThreadsEngine._serve


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of all pools: of an engine's blocks, and of the large one."""
    found: list[int] = []
    real = BufferPool.__init__

    def make(pool: BufferPool, count: int, nbytes: int) -> None:
        found.append(count * nbytes)
        real(pool, count, nbytes)

    monkeypatch.setattr(BufferPool, "__init__", make)
    fastserial.install(durable=False)
    yield found
    fastserial.uninstall()


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As beside a thread that never gives up the lock unasked."""
    monkeypatch.setattr(sys, "getswitchinterval", lambda: 1e-9)
    monkeypatch.setattr(crowding, "_waits", lambda: True)


@pytest.fixture
def processor() -> Iterator[None]:
    """One that this thread shares with three processes that never wait."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command) for _ in range(3)]
    time.sleep(0.5)
    yield
    os.sched_setaffinity(0, before)
    for process in busy:
        process.kill()
        process.wait()


def asked(seconds: float, enough: int = 1000) -> tuple[int, int]:
    """Return how often the lock was said to be kept, and how often asking took long.

    Between two questions this thread computes: one that does not gets a processor at once.
    """
    kept = late = 0
    end = time.monotonic() + seconds
    with quick_switches():
        while time.monotonic() < end:
            computed = time.thread_time() + 0.003
            while time.thread_time() < computed:
                pass
            began = time.perf_counter()
            kept += crowding._waits()
            late += time.perf_counter() - began > SWITCH_INTERVAL
            if kept == enough:
                break
    return kept, late


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {str(mib): torch.rand((mib * MIB + 20) // 4, generator=generator) for mib in (40, 3, 45)}


def saved(path: Path, obj: Any) -> bytes:
    torch.save(obj, path)
    return path.read_bytes()


def stock(path: Path, obj: Any) -> bytes:
    fastserial.uninstall()
    torch.save(obj, path)
    fastserial.install(durable=False)
    return path.read_bytes()


@pytest.mark.parametrize("error", [PermissionError(errno.EPERM, "no"), ValueError("no")])
def test_where_the_kernel_does_not_say_no_thread_waits(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(who: int) -> Any:
        raise error

    monkeypatch.setattr(crowding, "getrusage", refuse)
    assert not crowding._waits()


@pytest.mark.parametrize("direct", [True, False, "auto"])
@pytest.mark.parametrize("size", [64 * 1024, 2 * MIB])
def test_a_thread_that_waits_for_the_lock_goes_on_alone(
    tmp_path: Path,
    pools: list[int],
    crowded: None,
    monkeypatch: pytest.MonkeyPatch,
    direct: Any,
    size: int,
) -> None:
    obj = state()
    expected = stock(tmp_path / "state.pt", obj)
    moved: list[int] = []

    def note(request: Request) -> Completion:
        if request.length > size:
            moved.append(threading.get_ident())
        return serve(request)

    monkeypatch.setattr(ThreadsEngine, "_serve", staticmethod(note))
    with fastserial.options(direct=direct, block_size=size):
        assert saved(tmp_path / "state.pt", obj) == expected
    before, after = pools
    assert after == before
    assert set(moved) == {threading.get_ident()}
    report = fastserial.last_save_report()
    assert report is not None
    if direct:
        assert (report.fallback or "").startswith("another thread keeps the interpreter busy")


def test_more_blocks_than_one_may_be(
    tmp_path: Path, pools: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The large block ends at the largest block size, whatever memory the blocks took."""
    answers = iter([True])
    monkeypatch.setattr(crowding.Crowding, "found", lambda self: next(answers, False))
    data = os.urandom(12 * MIB)
    with (
        fastserial.options(block_size=2 * MIB, queue_depth=513, small_file=0),
        fastserial.FastFileWriter(tmp_path / "a") as writer,
    ):
        writer.write(data)
    assert pools == [513 * 2 * MIB, MAX_BLOCK]
    assert (tmp_path / "a").read_bytes() == data


@pytest.mark.parametrize("error", [MemoryError, OSError])
def test_without_memory_for_that(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pools: list[int],
    crowded: None,
    error: type[Exception],
) -> None:
    def allocate(engine: ThreadsEngine, count: int, nbytes: int) -> BufferPool:
        if count > 1:
            return BufferPool(count, nbytes)
        tried.append(nbytes)
        raise error

    tried: list[int] = []
    obj = state()
    expected = stock(tmp_path / "state.pt", obj)
    monkeypatch.setattr(ThreadsEngine, "allocate", allocate)
    assert saved(tmp_path / "state.pt", obj) == expected
    assert len(tried) == 1


@pytest.mark.parametrize("why", ["quick", "no other thread", "packed"])
def test_others_stay(
    tmp_path: Path, pools: list[int], crowded: None, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Small storages take time by themselves."""
    obj: Any = state()
    if why == "packed":
        obj = [torch.rand(1000) for _ in range(6000)]
    if why == "quick":
        monkeypatch.setattr(sys, "getswitchinterval", lambda: 10.0)
    if why == "no other thread":
        monkeypatch.setattr(crowding, "_waits", lambda: False)
    found = saved(tmp_path / "state.pt", obj)
    assert len(pools) == 1
    report = fastserial.last_save_report()
    assert report is not None
    assert report.fallback is None
    assert found == stock(tmp_path / "state.pt", obj)


@pytest.mark.parametrize("call", range(3))
def test_an_error_of_the_disk_is_raised(
    tmp_path: Path, pools: list[int], crowded: None, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Once the saving thread writes."""
    obj = state()
    expected = stock(tmp_path / "state.pt", obj)
    calls: list[Request] = []

    def note(request: Request) -> Completion:
        if threading.get_ident() == caller:
            calls.append(request)
        if len(calls) > call:
            return Completion(request, 0, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        return serve(request)

    caller = threading.get_ident()
    monkeypatch.setattr(ThreadsEngine, "_serve", staticmethod(note))
    obj["40"] += 1
    with pytest.raises(fastserial.WriteError, match="No space left"):
        torch.save(obj, tmp_path / "state.pt")
    assert (tmp_path / "state.pt").read_bytes() == expected
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]


def test_beside_a_thread_that_spins(tmp_path: Path, pools: list[int]) -> None:
    """Whatever becomes of the blocks."""
    obj = state()
    with spinning():
        assert saved(tmp_path / "state.pt", obj) == stock(tmp_path / "state.pt", obj)
    assert pools


def test_a_thread_that_spins_is_told() -> None:
    with spinning():
        kept, _ = asked(seconds=60, enough=20)
    assert kept == 20


def test_busy_processes_are_told_from_such_a_thread(processor: None) -> None:
    """With them, letting go of the lock takes long as well: for want of a processor."""
    kept, late = asked(seconds=2)
    assert late > 20
    assert kept <= late // 10
