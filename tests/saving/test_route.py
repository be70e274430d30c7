"""The route of a file's blocks: decided before the first one, changed between two of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastserial.config import Config
from fastserial.engines import Request, threads
from fastserial.engines.threads import ThreadsEngine, transfer
from fastserial.files import linux
from fastserial.formats.extents import Extent, Literal
from fastserial.interrupts import Descriptors
from fastserial.memory.buffers import BufferPool
from fastserial.saving.extent_writer import ExtentWriter, choose_route

BLOCKS: dict[str, Any] = {"small_file": 0, "block_size": 65536, "queue_depth": 3, "threads": 2}


@pytest.fixture
def fd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A new file on a device that nobody measured."""
    monkeypatch.setattr(linux, "_speeds", {})
    found = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    yield found
    os.close(found)


def need_direct(fd: int) -> None:
    with Descriptors() as files:
        if choose_route(fd, files, Config(direct=True), None).kind != "direct":
            pytest.skip("no direct I/O here")


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
