"""Where a save goes: to a new file or into the old one, and to the file that stock would write."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.corpus import FORMATS
from support.identity import difference, fast, stock
from support.processes import run

import fastserial
from fastserial.files import linux
from fastserial.files.durable import replace_bytes
from fastserial.reports import SAVES

SMALL = {"x": torch.arange(1000.0)}
HELD = "this process has the file open or locked"

both_formats = pytest.mark.parametrize("fmt", FORMATS)
both_ways = pytest.mark.parametrize("way", [{}, {"small_file": 0}], ids=["small", "blocks"])


def save(f: Any, fmt: str = "zip", live: Any = SMALL) -> None:
    torch.save(live, f, _use_new_zipfile_serialization=fmt == "zip")


def fallback() -> str | None:
    report = fastserial.last_save_report()
    assert report is not None
    return report.fallback


def why_torch() -> list[str]:
    """Return why torch wrote files itself in this test."""
    return [way.reason for way in fastserial.summary().saves.why_torch]


@pytest.fixture(autouse=True)
def counted_anew() -> None:
    SAVES.clear()


# -- files that this process has open ----------------------------------------------------------


@both_formats
@both_ways
def test_a_temporary_file_is_read_through_its_handle(
    fmt: str, way: dict[str, Any], tmp_path: Path
) -> None:
    with tempfile.NamedTemporaryFile(dir=tmp_path, suffix=".pt") as file:
        with stock():
            save(file.name, fmt)
        want = file.read()
        file.seek(0)
        with fast(**way):
            save(file.name, fmt)
        assert difference(want, file.read()) is None
        assert why_torch() == [HELD]
        assert os.listdir(tmp_path) == [os.path.basename(file.name)]


def test_a_lock_stays_on_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    with path.open("rb") as mine, fast():
        fcntl.flock(mine, fcntl.LOCK_EX)
        save(path)
        with path.open("rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("alone", [True, False])
def test_a_file_that_is_open_for_reading_is_replaced(tmp_path: Path, alone: bool) -> None:
    """Whether another thread runs or not: a leaked handle does not make the save less safe."""
    ended = run("open_while_saving", tmp_path, int(alone))
    assert json.loads(ended.out) == {"fallback": None, "held": "old", "there": "new"}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the program has x86-64's numbers")
def test_system_calls_that_a_filter_refuses(tmp_path: Path) -> None:
    """A container's seccomp profile says EPERM or ENOSYS; stock torch needs none of these calls."""
    assert json.loads(run("filtered", tmp_path).out) == {}


def test_a_mapped_file_is_replaced(tmp_path: Path) -> None:
    """Emptied, as by stock, it would kill the process that touches the old tensors."""
    path = tmp_path / "a.pt"
    with fast():
        save(path, live={"x": torch.arange(300_000.0)})
        mapped = torch.load(path, mmap=True)["x"]
        save(path)
        assert fallback() is None
    assert mapped.equal(torch.arange(300_000.0))


# -- names of descriptors, links ---------------------------------------------------------------

SPELLINGS: dict[str, Callable[[int], str]] = {
    "plain": lambda fd: f"/proc/self/fd/{fd}",
    "two slashes": lambda fd: f"//proc/self/fd/{fd}",
    "a dot": lambda fd: f"/./proc/self/fd/{fd}",
    "a dot in /dev": lambda fd: f"/dev/./fd/{fd}",
    "of a thread": lambda fd: f"/proc/thread-self/fd/{fd}",
    "relative": str,
}


@both_formats
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_descriptor_by_any_name(
    spelling: str, fmt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: dict[str, bytes] = {}
    for side, context in {"stock": stock, "fast": fast}.items():
        with tempfile.TemporaryFile(dir=tmp_path) as file, monkeypatch.context() as patch:
            if spelling == "relative":
                patch.chdir("/proc/self/fd")
            with context():
                save(SPELLINGS[spelling](file.fileno()), fmt)
            file.seek(0)
            written[side] = file.read()
        assert os.listdir(tmp_path) == []
    assert len(written["stock"]) > 4000
    assert len(written["fast"]) == len(written["stock"])  # the archive may be named by the number


# -- reserving space ---------------------------------------------------------------------------


def test_space_is_not_reserved_where_a_signal_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems start over after each, and a profiler's timer never ends."""

    def fallocate(*arguments: object) -> int:
        ctypes.set_errno(errno.EINTR)
        return -1

    monkeypatch.setattr(linux, "_libc", SimpleNamespace(fallocate=fallocate))
    with (tmp_path / "x").open("wb") as file:
        assert linux.preallocate(file.fileno(), 0, 1 << 20) is False


# -- callers that have no stock behind them ----------------------------------------------------


def test_a_writer_says_what_to_do_instead(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    with path.open("r+b"), pytest.raises(fastserial.WriteError) as caught:
        fastserial.FastFileWriter(path)
    text = str(caught.value)
    assert HELD in text
    assert "close the file before it is saved to" in text
    assert "Save to another path" in text
    assert str(path) in text
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.pt"]


def test_save_async_lets_torch_write_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    with stock():
        save(path)
    want = path.read_bytes()
    with path.open("r+b"), fast():
        report = fastserial.save_async(SMALL, path).wait()
    assert difference(want, path.read_bytes()) is None
    assert (report.fallback, report.engine, report.durable) == (HELD, "torch", False)
    (why,) = fastserial.summary().saves.why_torch
    assert (why.count, why.reason) == (1, HELD)


def test_small_files_are_written_over_what_cannot_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "latest"
    path.write_bytes(b"something longer")
    with path.open("r+b") as held:
        inode = path.stat().st_ino
        replace_bytes(str(path), b"new")
        assert held.read() == b"new"
    assert path.stat().st_ino == inode
    replace_bytes(str(path), b"newer")
    assert path.stat().st_ino != inode
