"""Every byte of a file is read exactly once, from the page cache or from the disk."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fastserial.config import Config
from fastserial.loading.scan import scan

BLOCK = 8192


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "x"
    path.write_bytes(os.urandom(10 * BLOCK + 777))
    return path


def read(path: Path, start: int, end: int, **options: Any) -> tuple[bytes, list[tuple[int, int]]]:
    """Return what `scan` shows of bytes [start, end), and which blocks failed."""
    pieces: dict[int, bytes] = {}
    failed: list[tuple[int, int]] = []
    lock = threading.Lock()

    def visit(offset: int, view: memoryview) -> None:
        with lock:
            assert offset not in pieces
            pieces[offset] = bytes(view)

    config = Config(block_size=BLOCK, **{"queue_depth": 3, "threads": 2, **options})
    with path.open("rb") as file:
        scan(file.fileno(), start, end, visit, lambda *what: failed.append(what[:2]), config)
    at = start
    for offset, piece in sorted(pieces.items()):
        if not failed:
            assert offset == at
        at = offset + len(piece)
    return b"".join(piece for _, piece in sorted(pieces.items())), failed


@pytest.mark.parametrize("direct", ["auto", False])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    ("start", "end"),
    [(0, None), (0, BLOCK), (1, BLOCK), (5, 3 * BLOCK + 1), (BLOCK, 2 * BLOCK), (BLOCK - 1, BLOCK)],
)
def test_every_byte_once(
    path: Path, direct: Any, cached: bool, start: int, end: int | None
) -> None:
    data = path.read_bytes()
    if not cached:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    end = len(data) if end is None else end
    assert read(path, start, end, direct=direct) == (data[start:end], [])


@pytest.mark.parametrize(("threads", "depth"), [(1, 1), (1, 4), (8, 1), (8, 8)])
def test_any_number_of_threads_and_buffers(path: Path, threads: int, depth: int) -> None:
    data = path.read_bytes()
    assert read(path, 0, len(data), threads=threads, queue_depth=depth)[0] == data


def test_a_block_that_only_direct_io_cannot_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = path.read_bytes()
    real = os.preadv

    def preadv(fd: int, buffers: Any, offset: int, *flags: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert read(path, 0, len(data)) == (data, [])


def test_a_block_that_cannot_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = path.read_bytes()
    real = os.preadv

    def preadv(fd: int, buffers: Any, offset: int, *flags: int) -> int:
        if offset == 2 * BLOCK:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    found, failed = read(path, 0, len(data))
    assert failed == [(2 * BLOCK, BLOCK)]
    assert found == data[: 2 * BLOCK] + data[3 * BLOCK :]


def test_a_file_shorter_than_said(path: Path) -> None:
    data = path.read_bytes()
    assert read(path, 0, len(data) + 5 * BLOCK)[0] == data


def test_an_error_of_the_visitor_ends_the_scan(path: Path) -> None:
    def visit(offset: int, view: memoryview) -> None:
        raise ZeroDivisionError

    before = len(os.listdir("/proc/self/task"))
    with path.open("rb") as file, pytest.raises(ZeroDivisionError):
        scan(file.fileno(), 0, 10 * BLOCK, visit, lambda *what: None, Config(block_size=BLOCK))
    for _ in range(200):  # until the kernel has taken leave of those that ended
        if len(os.listdir("/proc/self/task")) <= before:
            break
        time.sleep(0.05)
    assert len(os.listdir("/proc/self/task")) <= before
