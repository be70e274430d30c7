"""torch.load from file objects: values, position and state of the file as with stock."""

from __future__ import annotations

import contextlib
import gzip
import io
import logging
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpus import FORMATS, noise
from support.identity import fast, stock
from support.loading import FORCED, both, forced, last_report

from fastserial.reports import LoadReport, last_load_report

DIRECT = FORCED["direct"]
HEAD = b"h" * 777


@pytest.fixture(autouse=True)
def _forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with forced(monkeypatch, 5000):
        yield


def body(fmt: str, value: Any) -> bytes:
    """The bytes of a checkpoint."""
    buffer = io.BytesIO()
    with stock():
        torch.save(value, buffer, _use_new_zipfile_serialization=fmt == "zip")
    return buffer.getvalue()


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


class _Inverting(io.FileIO):
    """Gives other bytes than the descriptor."""

    def read(self, *args: Any) -> bytes:
        return super().read(*args).translate(bytes(range(255, -1, -1)))

    def readinto(self, buffer: Any) -> int:
        found = super().readinto(buffer) or 0
        view = memoryview(buffer).cast("B")
        view[:found] = bytes(view[:found]).translate(bytes(range(255, -1, -1)))
        return found

    def readline(self, *args: Any) -> bytes:
        return super().readline(*args).translate(bytes(range(255, -1, -1)))


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
    "memory": lambda p: io.BytesIO(p.read_bytes()),
    "after_read": lambda p: _at(_after_read(open(p, "rb"), 5), 0),
}
FAST = ("plain", "unbuffered", "fileio", "big_buffer", "read_write", "descriptor", "fsspec")


def _at(file: Any, position: int) -> Any:
    file.seek(position)
    return file


@pytest.mark.parametrize("value", [VALUE, EMPTY_LAST, NO_STORAGE], ids=["data", "empty", "none"])
@pytest.mark.parametrize("opener", OPENERS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_file_objects(fmt: str, opener: str, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    path.write_bytes(body(fmt, value))
    files: list[Any] = []

    def load() -> Any:
        files.append(OPENERS[opener](path))
        return torch.load(files[-1])

    def left() -> Any:
        file = files.pop()
        found = file.tell(), file.closed, getattr(file, "reads", None) and "read"
        file.close()
        return found

    both(load, DIRECT, FORCED["verified"], {}, extra=left)
    if opener in FAST and value is VALUE:
        with fast(**DIRECT), OPENERS[opener](path) as file:
            torch.load(file)
        report = last_report()
        assert (report.engine, report.fallback) == ("threads", None)


def test_unpickled_tensors_make_no_report(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "f.pt"
    path.write_bytes(body("zip", VALUE))
    seen: list[LoadReport] = []
    caplog.set_level(logging.DEBUG, "fastserial")
    with fast(**DIRECT, on_load=seen.append):
        torch.load(path)
        caplog.clear()
        assert pickle.loads(pickle.dumps(torch.ones(9))).sum() == 9  # as queues and DCP do
    assert [last_load_report()] == seen
    assert seen[0].path == str(path)
    assert "READ" not in caplog.text


def test_a_verified_load_from_memory_says_it_was_not(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    path.write_bytes(body("zip", VALUE))
    for f, verified in ((path, True), (io.BytesIO(path.read_bytes()), False)):
        with fast(**FORCED["verified"]):
            torch.load(f)
        report = last_report()
        assert report.verified is verified


def test_loads_are_logged_for_debugging(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "f.pt"
    path.write_bytes(body("zip", VALUE))
    caplog.set_level(logging.DEBUG, "fastserial")
    levels = []
    for options in (DIRECT, {}):
        with fast(**options):
            caplog.clear()
            torch.load(path)
        levels += [record.levelno for record in caplog.records if "READ" in record.message]
    assert levels == [logging.DEBUG, logging.DEBUG]


@pytest.mark.parametrize("opener", ["plain", "unbuffered", "read_write", "memory", "fsspec"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_at_a_position(fmt: str, opener: str, tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    path.write_bytes(HEAD + body(fmt, VALUE))
    files: list[Any] = []

    def load() -> Any:
        files.append(_at(OPENERS[opener](path), len(HEAD)))
        return torch.load(files[-1])

    def left() -> Any:
        with files.pop() as file:
            return file.tell()

    assert both(load, DIRECT, extra=left).error is None


@pytest.mark.parametrize("opener", ["plain", "unbuffered", "read_write"])
def test_two_in_one_file(opener: str, tmp_path: Path) -> None:
    """Legacy checkpoints may follow each other."""
    path = tmp_path / "f.pt"
    path.write_bytes(body("legacy", VALUE) + body("legacy", EMPTY_LAST) + b"tail")

    def load() -> Any:
        with OPENERS[opener](path) as file:
            return [torch.load(file), torch.load(file), file.tell(), file.read()]

    want = both(load, DIRECT, {})
    assert want.error is None
    assert want.value[-1] == b"tail"


def test_pending_writes(tmp_path: Path) -> None:
    """What a file object has not written yet is there for torch.load."""
    for fmt in FORMATS:
        data = body(fmt, VALUE)

        def load(data: bytes = data) -> Any:
            with open(tmp_path / "f.pt", "w+b", buffering=1 << 20) as file:
                file.write(data)
                file.seek(0)
                return torch.load(file)

        assert both(load, DIRECT, {}).error is None


@pytest.mark.parametrize("fmt", FORMATS)
def test_bytes_that_are_not_the_files(fmt: str, tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    path.write_bytes(body(fmt, VALUE).translate(bytes(range(255, -1, -1))))

    def load() -> Any:
        with _Inverting(path) as file:
            return torch.load(file)

    both(load, DIRECT)
    squeezed = tmp_path / "f.gz"
    squeezed.write_bytes(gzip.compress(body(fmt, VALUE)))

    def inflate() -> Any:
        with gzip.open(squeezed) as file:
            return torch.load(file)

    both(inflate, DIRECT)


@pytest.mark.parametrize("fmt", FORMATS)
def test_odd_paths(fmt: str, tmp_path: Path) -> None:
    data = body(fmt, VALUE)
    for name in ("größe.pt", " spaces .pt", "%s.pt", os.fsdecode(b"\xff\xfe.pt"), "-"):
        (tmp_path / name).write_bytes(data)
        both(lambda n=name: torch.load(tmp_path / n), DIRECT)
        both(lambda n=name: torch.load(str(tmp_path / n)), DIRECT)
    (tmp_path / "link").symlink_to("-")
    both(lambda: torch.load(tmp_path / "link"), DIRECT)
    both(lambda: torch.load(tmp_path), DIRECT)
    both(lambda: torch.load(b"bytes"), DIRECT)
    both(lambda: torch.load(5), DIRECT)
    both(lambda: torch.load(None), DIRECT)


def test_fifo(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)

    def load() -> Any:
        writer = threading.Thread(target=_feed, args=(path,), daemon=True)
        writer.start()
        try:
            return torch.load(path)
        finally:
            writer.join(10)

    both(load, DIRECT)


def _feed(path: Path) -> None:
    with contextlib.suppress(BrokenPipeError):
        path.write_bytes(b"some bytes")


def test_temporary_files() -> None:
    for fmt in FORMATS:
        for kind in (tempfile.TemporaryFile, tempfile.NamedTemporaryFile):

            def load(fmt: str = fmt, kind: Any = kind) -> Any:
                with kind() as file:
                    file.write(body(fmt, VALUE))
                    file.seek(0)
                    return torch.load(file)

            assert both(load, DIRECT).error is None


def test_deleted_file(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    for fmt in FORMATS:
        data = body(fmt, VALUE)

        def load(data: bytes = data) -> Any:
            path.write_bytes(data)
            with open(path, "rb") as file:
                path.unlink()
                return torch.load(file)

        assert both(load, DIRECT).error is None


def test_closed_and_write_only_files(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    path.write_bytes(body("zip", VALUE))
    closed = open(path, "rb")
    closed.close()
    both(lambda: torch.load(closed), DIRECT)

    def load() -> Any:
        with open(path, "ab") as file:
            return torch.load(file)

    both(load, DIRECT)
