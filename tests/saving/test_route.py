"""The route of a file's blocks: decided before the first one, changed between two of them."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastserial.config import Config
from fastserial.engines import Request, threads
from fastserial.engines.threads import ThreadsEngine, transfer
from fastserial.errors import WriteError
from fastserial.files import linux
from fastserial.formats.extents import Extent, Literal
from fastserial.interrupts import Descriptors
from fastserial.memory.buffers import BufferPool
from fastserial.saving.extent_writer import ExtentWriter, choose_route
from fastserial.saving.writer import FastFileWriter

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
    monkeypatch.setattr(linux, "_refusing", set())
    outcome = write(fd, os.urandom(2_000_000), Config(**BLOCKS, direct=True)).outcome
    assert 1 <= len(refused) <= 2 * BLOCKS["queue_depth"]
    assert not outcome.direct
    assert "refused" in str(outcome.fallback)
    assert outcome.engine_bytes + outcome.plain_bytes == 2_000_000


def test_what_refuses_direct_writes_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS 4.2 takes the flag, and answers EINVAL to the write. Nothing there is faster."""
    refused: list[Request] = []

    def refuse(request: Request) -> int:
        if fcntl.fcntl(request.fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(request)
            raise OSError(errno.EINVAL, "Invalid argument")
        return transfer(request)

    monkeypatch.setattr(threads, "transfer", refuse)
    monkeypatch.setattr(linux, "is_fast", lambda fd: True)
    monkeypatch.setattr("fastserial.saving.extent_writer.is_fast", lambda fd: True)
    monkeypatch.setattr(linux, "_refusing", set())
    outcomes, asked = [], []
    for direct in ("auto", "auto", True, "auto"):
        fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        need_direct(fd)
        refused.clear()
        outcomes.append(write(fd, os.urandom(2_000_000), Config(**BLOCKS, direct=direct)).outcome)
        asked.append(bool(refused))
        os.close(fd)
    assert asked == [True, False, True, False]  # a wish is one
    assert [one.fallback is None for one in outcomes] == [False, True, False, True]
    assert "none needed" in str(getattr(outcomes[0].fallback, "remedy", ""))
    assert not any(one.direct for one in outcomes)


@pytest.mark.parametrize("call", ["fallocate", "sync_file_range"])
@pytest.mark.parametrize(
    ("number", "is_disks"),
    [
        *((number, True) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)),
        *((number, False) for number in (errno.EINVAL, errno.EACCES, errno.ENOTTY, errno.EBADE)),
    ],
)
def test_only_the_disks_errors_of_a_call_that_is_not_needed_fail_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, is_disks: bool
) -> None:
    """FUSE servers may answer anything."""
    called: list[int] = []

    class Library:
        def __getattr__(self, name: str) -> Any:
            return refuse if name == call else getattr(library, name)

    def refuse(*arguments: object) -> int:
        called.append(0)
        ctypes.set_errno(number)
        return -1

    library = linux._libc
    monkeypatch.setattr(linux, "_speeds", {})
    monkeypatch.setattr(linux, "_libc", Library())
    if call == "sync_file_range":
        monkeypatch.setattr(linux, "_sync_file_range", refuse)
    path, data = tmp_path / "f", os.urandom(300_000)
    path.write_bytes(b"old")
    monkeypatch.setattr(linux, "TRIAL", 65536)
    failed = None
    try:
        with FastFileWriter(path, Config(**BLOCKS)) as writer:
            writer.write_layout([Extent(0, len(data), Literal(data))], len(data))
    except WriteError as error:
        failed = error.errno
    assert called or call == "sync_file_range"  # there is no trial without direct I/O
    assert failed == (number if is_disks and called else None)
    assert path.read_bytes() == (data if failed is None else b"old")
