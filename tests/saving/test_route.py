"""The route of a file's blocks: decided before the first one, changed between two of them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.corpus import MIB

from fastserial.config import Config
from fastserial.engines import Capabilities, Op, Request, threads
from fastserial.engines.threads import ThreadsEngine, transfer
from fastserial.files import linux
from fastserial.formats.extents import Extent, Literal
from fastserial.interrupts import Descriptors
from fastserial.memory.buffers import BufferPool
from fastserial.saving import extent_writer as routes
from fastserial.saving.extent_writer import ExtentWriter, Route, choose_route

BLOCKS: dict[str, Any] = {"small_file": 0, "block_size": 65536, "queue_depth": 3, "threads": 2}


@pytest.fixture
def fd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A new file on a device that nobody measured."""
    monkeypatch.setattr(linux, "_speeds", {})
    found = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    yield found
    os.close(found)


def chosen(fd: int, expected: int | None = None, **options: Any) -> Route:
    with Descriptors() as files:
        return choose_route(fd, files, Config(**options), expected)


def need_direct(fd: int) -> None:
    if chosen(fd, direct=True).kind != "direct":
        pytest.skip("no direct I/O here")


class OwnMemory(ThreadsEngine):
    """As an engine that only moves its own buffers."""

    capabilities = Capabilities(any_memory=False)


def test_options_decide(fd: int) -> None:
    need_direct(fd)
    assert chosen(fd, direct=True).kind == "direct"
    assert chosen(fd, cache="drop").kind == "direct"
    assert chosen(fd, cache="keep").kind == "cached"
    assert chosen(fd, cache="drop", direct=False).kind == "cached"
    assert chosen(fd, transfer="cpu_cached_gpu").kind == "cached"
    assert chosen(fd, engine=OwnMemory).kind == "direct"
    assert chosen(fd).kind == "trial"


def test_what_does_not_fit_in_memory_goes_past_the_cache(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_direct(fd)
    monkeypatch.setattr(linux, "available_bytes", lambda: 100 * MIB)
    assert chosen(fd, 99 * MIB).kind == "trial"
    assert chosen(fd, 101 * MIB).kind == "direct"
    assert chosen(fd, 101 * MIB, cache="keep").kind == "cached"


def test_a_file_that_is_compressed(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes through the page cache and nothing is reserved, unless direct I/O is asked for."""
    need_direct(fd)
    reserved: list[tuple[int, int, int]] = []
    monkeypatch.setattr(linux, "preallocate", lambda *place: reserved.append(place))
    for compresses in (False, True):
        monkeypatch.setattr(routes, "compresses", lambda fd, found=compresses: found)
        monkeypatch.setattr(linux, "compresses", lambda fd, found=compresses: found)
        route = chosen(fd, cache="drop")
        assert route.kind == ("cached" if compresses else "direct")
        assert ("compresses" in str(route.fallback)) is compresses
        assert chosen(fd, direct=True).kind == "direct"
        for options in ({}, {"preallocate": False}, {"direct": True}):
            linux.reserve(fd, 7, 64 * MIB, Config(**options))
        linux.reserve(fd, 7, MIB, Config())  # a small file
    place = (fd, 7, 64 * MIB)
    assert reserved == [place, place, place]


@pytest.mark.parametrize("prepare_here", [True, False])
def test_without_threads_the_submitting_one_moves_the_blocks(fd: int, prepare_here: bool) -> None:
    ran: list[int] = []
    engine = ThreadsEngine(0, prepare_here)
    pool = engine.allocate(1, 4096)
    engine.open(pool.buffers, 1)
    buffer = pool.take()
    buffer.view[:3] = b"abc"
    request = Request(Op.WRITE, fd, 5, 3, buffer, lambda _: ran.append(threading.get_ident()))
    engine.submit([request])
    assert [done.transferred for done in engine.wait(1)] == [3]
    engine.close()
    assert ran == [threading.get_ident()]
    assert os.pread(fd, 9, 0) == bytes(5) + b"abc"


def write(fd: int, data: bytes, config: Config) -> ExtentWriter:
    out = ExtentWriter(fd, config)
    try:
        out.expect(len(data))
        half = len(data) // 2
        out.write([Extent(0, half, Literal(data[:half]))])
        out.write([Extent(half, len(data) - half, Literal(data[half:]))])
        out.flush()
    finally:
        out.close()
    assert os.pread(fd, len(data) + 1, 0) == data
    return out


@pytest.mark.parametrize("error", [MemoryError("none"), OSError(errno.ENOMEM, "none")])
def test_without_memory_for_an_engine(
    fd: int, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def allocate(engine: ThreadsEngine, count: int, nbytes: int) -> BufferPool:
        tried.append(count)
        raise error

    tried: list[int] = []
    monkeypatch.setattr(ThreadsEngine, "allocate", allocate)
    outcome = write(fd, os.urandom(1_000_000), Config(**BLOCKS)).outcome
    assert tried == [3]
    assert "block by block: " in str(outcome.fallback)
    assert (outcome.engine, outcome.direct) == ("buffered", False)
    assert outcome.plain_bytes == 1_000_000


def test_an_error_of_an_engine_is_no_want_of_memory(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools: list[BufferPool] = []

    def open_engine(engine: ThreadsEngine, buffers: Any, queue_depth: int) -> None:
        raise OSError(errno.EIO, "broken")

    def allocate(engine: ThreadsEngine, count: int, nbytes: int) -> BufferPool:
        pools.append(BufferPool(count, nbytes))
        return pools[-1]

    monkeypatch.setattr(ThreadsEngine, "open", open_engine)
    monkeypatch.setattr(ThreadsEngine, "allocate", allocate)
    with pytest.raises(OSError, match="broken"):
        write(fd, bytes(1_000_000), Config(**BLOCKS))
    assert [pool.free for pool in pools] == [0]  # it was given back


def test_direct_writes_that_are_refused_all_go_through_the_cache(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_direct(fd)

    def refuse(request: Request) -> int:
        if request.fd != fd:
            refused.append(request)
            raise OSError(errno.EINVAL, "Invalid argument")
        return transfer(request)

    refused: list[Request] = []
    monkeypatch.setattr(threads, "transfer", refuse)
    outcome = write(fd, os.urandom(2_000_000), Config(**BLOCKS, direct=True)).outcome
    assert 1 <= len(refused) <= 2 * BLOCKS["queue_depth"]
    assert not outcome.direct
    assert "refused" in str(outcome.fallback)
    assert outcome.engine_bytes + outcome.plain_bytes == 2_000_000
