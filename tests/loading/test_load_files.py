"""torch.load from file objects: values, position and state of the file as with stock."""

from __future__ import annotations

import gc
import gzip
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpus import FORMATS, noise
from support.identity import fast, saved, stock_bytes
from support.loading import FORCED, both, last_report

import fastserial
from fastserial.errors import CheckpointFileError
from fastserial.loading import session

DIRECT = FORCED["direct"]
pytestmark = pytest.mark.usefixtures("all_forced")


VALUE = {"w": torch.randn(70, 300), "e": torch.empty(0), "s": noise(700), "last": noise(9001)}
EMPTY_LAST = {"w": torch.randn(70, 300), "e": torch.empty(0)}
NO_STORAGE = {"n": 5}

Opener = Callable[[Path], Any]


def _fsspec(path: Path) -> Any:
    local = pytest.importorskip("fsspec.implementations.local")
    return local.LocalFileSystem().open(str(path), "rb")


def _after_read(file: Any, count: int) -> Any:
    file.read(count)
    return file


class _Wrapped:
    """Passes all on to a file, `fileno` included."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.reads = 0

    def read(self, *args: Any) -> Any:
        self.reads += 1
        return self.file.read(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


# ruff: noqa: SIM115
OPENERS: dict[str, Opener] = {
    "plain": lambda p: open(p, "rb"),
    "unbuffered": lambda p: open(p, "rb", buffering=0),
    "fileio": io.FileIO,
    "big_buffer": lambda p: open(p, "rb", buffering=1 << 20),
    "read_write": lambda p: open(p, "r+b"),
    "descriptor": lambda p: os.fdopen(os.open(p, os.O_RDONLY), "rb"),
    "fsspec": _fsspec,
    "wrapped": lambda p: _Wrapped(open(p, "rb")),
    "unwritten": lambda p: _rewritten(p),
    "memory": lambda p: io.BytesIO(p.read_bytes()),
    "after_read": lambda p: _at(_after_read(open(p, "rb"), 5), 0),
}
FAST = ("plain", "unbuffered", "fileio", "big_buffer", "read_write", "descriptor", "fsspec")


def _rewritten(path: Path) -> Any:
    """What a file object has not written yet is there for torch.load."""
    data = path.read_bytes()
    file = open(path, "w+b", buffering=1 << 20)
    file.write(data)
    return _at(file, 0)


def _at(file: Any, position: int) -> Any:
    file.seek(position)
    return file


@pytest.mark.parametrize(
    ("value", "head"),
    [(VALUE, b""), (EMPTY_LAST, b""), (NO_STORAGE, b""), (VALUE, b"h" * 777)],
    ids=["data", "empty", "none", "at a position"],
)
@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_file_objects(fmt: str, opener: str, value: Any, head: bytes, tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    path.write_bytes(head + stock_bytes(value, fmt))
    files: list[Any] = []

    def load() -> Any:
        files.append(_at(OPENERS[opener](path), len(head)))
        return torch.load(files[-1])

    def left() -> Any:
        file = files.pop()
        found = file.tell(), file.closed, getattr(file, "reads", None) and "read"
        file.close()
        return found

    want = both(load, DIRECT, FORCED["verified"], {}, extra=left)
    assert want.error is None
    if opener in FAST and value is VALUE and not head and fmt == "zip":
        with fast(**DIRECT), OPENERS[opener](path) as file:
            torch.load(file)
        report = last_report()
        assert (report.engine, report.fallback) == ("threads", None)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_file_that_is_not_plain_is_reported(fmt: str, tmp_path: Path) -> None:
    torch.save(VALUE, tmp_path / "plain.pt")
    data = stock_bytes(VALUE, fmt)
    with fast(verify_on_load=True):
        for file in (io.BytesIO(data), gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(data, 1)))):
            torch.load(tmp_path / "plain.pt")
            torch.load(file)
            report = last_report()
            assert (report.path, report.container) == (repr(file), fmt)
            assert "not a plain file" in str(report.fallback)
        torch.load(tmp_path / "plain.pt")
        torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(stock_bytes(VALUE, "zip")))
        assert last_report().path == str(tmp_path / "plain.pt")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TimeoutError("alarm")])
def test_a_load_that_ends_at_its_beginning_leaves_nothing_open(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened = saved(tmp_path, [noise(300)]), []

    def interrupted(file: Any, small: int) -> Any:
        opened.append(file)
        raise error

    monkeypatch.setattr(session, "file_source", interrupted)
    with fast(), pytest.raises(type(error)) as caught:
        torch.load(path)
    assert caught.value is error
    assert [file.closed for file in opened] == [True]


def test_a_load_that_ends_at_its_beginning_collects_garbage_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, before = saved(tmp_path, [noise(300)]), gc.get_threshold()
    monkeypatch.setattr(session, "_open", None)  # what is used last
    with fast(), pytest.raises(AttributeError) as caught:
        torch.load(path)
    assert gc.get_threshold() == before
    assert caught.value.__traceback__ is not None  # it keeps the load


@pytest.mark.parametrize("what", ["file", "no checkpoint"])
def test_open_that_fails_leaves_nothing_open(what: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(b"none")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises((OSError, CheckpointFileError)) as caught:
        fastserial.open(tmp_path if what == "file" else path)
    assert len(os.listdir("/proc/self/fd")) == before
    assert caught.value.__traceback__ is not None
