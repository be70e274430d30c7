"""Small files, which torch's own writer fills: what it cannot do is done as for large ones."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.identity import stock

import fastserial
from fastserial.errors import WriteError
from fastserial.saving import small

STATE = {"a": torch.arange(5000.0), "b": torch.arange(70_000), "text": "x" * 300}


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    fastserial.install(durable=False)
    yield
    fastserial.uninstall()


def stock_save(obj: object, path: Path) -> None:
    with stock():
        torch.save(obj, path)


class Flawed:
    """torch's writer, but one of its calls does something else."""

    def __init__(self, real: Any, number: int, flaw: Callable[[], None]) -> None:
        self.real, self.left, self.flaw = real, number, flaw

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    def write_record(self, *given: Any) -> None:
        self.left -= 1
        if not self.left:
            self.flaw()
        self.real.write_record(*given)

    def write_end_of_file(self) -> None:
        self.real.write_end_of_file()
        if self.left > 0:
            self.flaw()


def _flawed(monkeypatch: pytest.MonkeyPatch, number: int, flaw: Callable[[], None]) -> None:
    real = small.new_writer
    monkeypatch.setattr(small, "new_writer", lambda *given: Flawed(real(*given), number, flaw))


def _fail() -> None:
    raise RuntimeError("it failed")


@pytest.mark.parametrize("number", [1, 4, 7, 99])
def test_what_torchs_writer_cannot_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It fails at one of the records, or at the end: the bytes are the same, and stay so."""
    path, theirs = tmp_path / "new" / "x.pt", tmp_path / "stock" / "x.pt"
    path.parent.mkdir()
    theirs.parent.mkdir()
    _flawed(monkeypatch, number, _fail)
    gc.disable()
    try:
        torch.save(STATE, path)
    finally:
        gc.enable()
    monkeypatch.undo()
    gc.collect()  # a writer that was left would write what it holds now
    stock_save(STATE, theirs)
    assert path.read_bytes() == theirs.read_bytes()


def test_a_file_that_is_cut_short_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.6 reports success though its last bytes were lost."""
    lost: list[int] = []
    whole = small._is_whole

    def cut(fd: int) -> bool:
        os.ftruncate(fd, os.fstat(fd).st_size - 10)
        lost.append(fd)
        return whole(fd)

    monkeypatch.setattr(small, "_is_whole", cut)
    torch.save(STATE, tmp_path / "x.pt")
    assert lost
    assert fastserial.verify(tmp_path / "x.pt").ok
    assert torch.equal(torch.load(tmp_path / "x.pt")["b"], STATE["b"])


def test_what_a_handler_raises_comes_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"old": 1}, tmp_path / "x.pt")

    def interrupt() -> None:
        raise KeyboardInterrupt

    _flawed(monkeypatch, 5, interrupt)
    with pytest.raises(KeyboardInterrupt):
        torch.save(STATE, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt") == {"old": 1}
    assert os.listdir(tmp_path) == ["x.pt"]


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    """Wherever it is full; torch's writer alone ends the process at some of these."""
    path = tmp_path / "x.pt"
    torch.save({"old": 1}, path)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for most in range(0, 600_000, 20_011):
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
            with pytest.raises(WriteError) as caught:
                torch.save(STATE, path)
            assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["x.pt"]


@pytest.mark.parametrize(
    "name", ["x.pt", "ä.pt", "a.b.pt", "a\\b.pt", ".pt", "x", "-.tar.gz", "a b.pt"]
)
def test_names(tmp_path: Path, name: str) -> None:
    for folder, save in (("ours", torch.save), ("stock", stock_save)):
        (tmp_path / folder).mkdir()
        try:
            save(STATE, tmp_path / folder / name)
        except RuntimeError:
            (tmp_path / folder / name).write_text("an error")
    assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes()
