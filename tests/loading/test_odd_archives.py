"""Archives that other programs wrote, changed or added to: read as torch reads them."""

from __future__ import annotations

import io
import shutil
import subprocess
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.archives import APPENDED, appended, checkpoint, rewritten, state
from support.identity import digest, stock
from support.loading import DEFAULT, FORCED, both, forced

import fastserial
from fastserial.checkpoints.load_into import load_into
from fastserial.errors import CheckpointFileError, CorruptCheckpointError, UnreadableTensorError

WAYS = (DEFAULT, *FORCED.values())


@pytest.fixture(autouse=True)
def _forced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with forced(monkeypatch, 5000):
        yield


def opened(path: Path) -> dict[str, torch.Tensor]:
    with fastserial.open(path) as file:
        return {key: file.get_tensor(key) for key in file}


def filled(path: Path) -> dict[str, torch.Tensor]:
    target = {key: torch.zeros_like(value) for key, value in state().items()}
    load_into(target, path, verify=True)
    return target


def agree(path: Path) -> Any:
    """Load with stock and in every way of ours: all give the same, and no error."""
    want = both(lambda: torch.load(path), *WAYS)
    assert want.error is None
    assert digest(fastserial.load(path, verify=True)) == digest(want.value)
    assert digest(opened(path)) == digest(want.value)
    assert digest(filled(path)) == digest(want.value)
    return want.value


@pytest.mark.parametrize("name", APPENDED)
def test_records_that_were_added(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(appended(checkpoint(), *APPENDED[name]))
    assert digest(agree(path)) == digest(state())


@pytest.mark.parametrize("what", ["unrelated", "a storage", "the pickle"])
def test_two_records_of_one_name(what: str, tmp_path: Path) -> None:
    """Torch's reader decides which of them counts."""
    data = checkpoint()
    turned = {key: value.flip(0) for key, value in state().items()}
    with zipfile.ZipFile(io.BytesIO(checkpoint(turned))) as file:
        other = {name: file.read(name) for name in file.namelist()}
    names = {
        "unrelated": ["archive/note", "archive/note"],
        "a storage": ["archive/data/0"],
        "the pickle": ["archive/data.pkl"],
    }[what]
    records = [(name, other.get(name, b"x"), zipfile.ZIP_STORED) for name in names]
    path = tmp_path / "x.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path.write_bytes(appended(data, *records))
    agree(path)


@pytest.mark.parametrize("count", [1, 65_535, 65_536, 65_557, 69_562])
def test_bytes_after_the_end(count: int, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(checkpoint() + bytes(count))
    assert digest(agree(path)) == digest(state())


def test_as_far_from_the_end_as_torch_looks(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(checkpoint() + bytes(69_563))
    with stock(), pytest.raises(RuntimeError):
        torch.load(path)
    with pytest.raises(CorruptCheckpointError):
        opened(path)


def test_an_encrypted_record(tmp_path: Path) -> None:
    if shutil.which("zip") is None:
        pytest.skip("needs Info-ZIP's zip")
    path = tmp_path / "x.pt"
    path.write_bytes(checkpoint())
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive" / "note").write_text("secret")
    command = ["zip", "-q", "-P", "word", path.name, "archive/note"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert digest(agree(path)) == digest(state())


def test_a_storage_that_torch_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    path.write_bytes(rewritten(checkpoint(), compression=zipfile.ZIP_BZIP2))
    want = both(lambda: torch.load(path), *WAYS)
    assert want.error is not None
    with pytest.raises((CheckpointFileError, UnreadableTensorError)):
        opened(path)
    with pytest.raises((CheckpointFileError, UnreadableTensorError)):
        filled(path)


@pytest.mark.parametrize("bit", range(16))
def test_verify_finds_the_flags_that_torch_refuses(bit: int, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    data = bytearray(rewritten(checkpoint(), compression=zipfile.ZIP_DEFLATED))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        at = archive.start_dir + 8  # the flags of the first entry
    data[at + bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    refused = both(lambda: torch.load(path), *WAYS).error is not None
    assert refused is (bit in (0, 5, 6, 13))
    assert fastserial.verify(path).ok is not refused
