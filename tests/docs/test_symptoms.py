"""Stock torch says what the troubleshooting page quotes, and fastserial does what it says."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fastserial

MIB = 1 << 20


@pytest.fixture(params=["stock", "fastserial"])
def ours(request: pytest.FixtureRequest) -> Iterator[bool]:
    if request.param == "fastserial":
        fastserial.install()
    yield request.param == "fastserial"
    fastserial.uninstall()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """40 MiB."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small disk")
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40M", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)  # stock's failed writer has it open


def _state(mib: int) -> dict[str, Any]:
    return {"weights": torch.ones(mib * MIB, dtype=torch.uint8)}


def test_full_disk(ours: bool, small_disk: Path) -> None:
    path = small_disk / "ckpt.pt"
    torch.save(_state(10), path)
    with pytest.raises(RuntimeError) as found:
        torch.save(_state(64), path)
    if ours:
        assert isinstance(found.value, fastserial.WriteError)
        assert found.value.errno == errno.ENOSPC
        assert "the previous file is intact" in str(found.value)
        assert len(torch.load(path)["weights"]) == 10 * MIB
    else:
        assert "unexpected pos" in str(found.value)
        with pytest.raises(RuntimeError, match="failed finding central directory"):
            torch.load(path)


def test_almost_full_disk(ours: bool, small_disk: Path) -> None:
    """Stock fits, since it destroys the old file first; we need room for both."""
    path = small_disk / "ckpt.pt"
    torch.save(_state(24), path)
    if ours:
        with pytest.raises(fastserial.WriteError):
            torch.save(_state(25), path)
        assert len(torch.load(path)["weights"]) == 24 * MIB
    else:
        torch.save(_state(25), path)


@pytest.mark.parametrize(
    ("legacy", "text"), [(False, "failed finding central directory"), (True, "unexpected EOF")]
)
def test_cut_file(ours: bool, tmp_path: Path, legacy: bool, text: str) -> None:
    path = tmp_path / "cut.pt"
    torch.save(_state(1), path, _use_new_zipfile_serialization=not legacy)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(RuntimeError, match=text):
        torch.load(path)
    assert fastserial.verify(path).status == "damaged"


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", EOFError),
        (bytes(100_000), RuntimeError),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", pickle.UnpicklingError),
    ],
)
def test_no_checkpoint(ours: bool, tmp_path: Path, content: bytes, error: type[Exception]) -> None:
    path = tmp_path / "no.pt"
    path.write_bytes(content)
    with pytest.raises(error):
        torch.load(path)
    lost = not content.strip(b"\0")
    assert fastserial.verify(path).status == ("damaged" if lost else "unreadable")
