"""`inspect` tells what is in a checkpoint without loading or executing it."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.nests import flat
from torch import nn
from typer.testing import CliRunner

import fastserial
from fastserial import verify
from fastserial.checkpoints.inspect import Inspection, inspect
from fastserial.cli.main import app
from fastserial.errors import (
    CorruptCheckpointError,
    PickleLimitError,
    UnreadableCheckpointError,
)
from fastserial.formats.pickles import Limits

FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def saved(value: Any, path: Path, zipped: bool = True) -> Inspection:
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    return inspect(path)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@FORMATS
def test_each_tensor_is_found_where_its_bytes_are(tmp_path: Path, zipped: bool) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 5)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "list": [torch.arange(5), (torch.ones(2, dtype=torch.bfloat16),)],
        3: torch.eye(3, dtype=torch.complex64),
    }
    path = tmp_path / "x.pt"
    found = saved(state, path, zipped)
    expected = flat(state)
    assert {tensor.key for tensor in found.tensors} == set(expected)
    raw = path.read_bytes()
    for tensor in found.tensors:
        value = expected[tensor.key]
        assert tensor.dtype == str(value.dtype).removeprefix("torch.")
        assert (tensor.shape, tensor.stride) == (tuple(value.shape), value.stride())
        assert tensor.is_contiguous == value.is_contiguous()
        at = found.offset_of(tensor)
        assert at is not None
        assert raw[at : at + tensor.nbytes] == bytes_of(value), tensor.key
    assert found.format == ("zip" if zipped else "legacy")
    assert found.bytes == len(raw)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("x.pt", b"hello", "neither"),
        ("x.pt", pickle.dumps([1]), "neither"),
        ("x.pt", b"\x93NUMPY" + bytes(500), "neither"),
        ("x.pt", bytes(300_000) + b"x", "neither"),
        ("__0_0.distcp", b"PK\3\4 and so on", "torch.distributed.checkpoint"),
    ],
)
def test_no_checkpoint(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    for call in (inspect, fastserial.open):
        with pytest.raises(UnreadableCheckpointError, match=f"{name}: .*{why}") as caught:
            call(path)
        assert not isinstance(caught.value, CorruptCheckpointError)
        assert isinstance(caught.value, RuntimeError)
    assert verify(path).status == "unreadable"


def test_a_directory_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpointError, match="a directory"):
        inspect(tmp_path)
    with pytest.raises(UnreadableCheckpointError, match="regular"):
        inspect("/dev/null")
    with pytest.raises(FileNotFoundError):
        inspect(tmp_path / "missing")


@pytest.mark.parametrize("nbytes", [0, 1, 300_000, 1 << 43])
def test_what_a_power_cut_leaves_is_damage(tmp_path: Path, nbytes: int) -> None:
    """Of stock's file, which is not synced: nothing, or a hole."""
    for name in ("x.pt", "x.safetensors", "x"):
        path = tmp_path / name
        path.write_bytes(b"")
        os.truncate(path, nbytes)
        if nbytes == 300_000:
            path.write_bytes(bytes(nbytes))
        for call in (inspect, fastserial.open, fastserial.convert):
            arguments = (path, tmp_path / "t.pt") if call is fastserial.convert else (path,)
            with pytest.raises(CorruptCheckpointError, match=f"{name}: the file"):
                call(*arguments)
        report = verify(path)
        assert (report.status, [one.kind for one in report.problems]) == ("damaged", ["truncated"])
        assert CliRunner().invoke(app, ["verify", str(path)]).exit_code == 1
        assert CliRunner().invoke(app, ["inspect", str(path)]).exit_code == 1


def test_damaged_first_bytes_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(3)}, path)
    path.write_bytes(b"????" + path.read_bytes()[4:])
    with pytest.raises(CorruptCheckpointError, match="first bytes"):
        inspect(path)


def test_long_values_do_not_count_against_the_limits(tmp_path: Path) -> None:
    """Replay buffers and tokenizers, say: megabytes in the pickle beside the tensors."""
    path = tmp_path / "x.pt"
    torch.save({"buffer": bytes(3 << 20), "w": torch.ones(3), "text": "t" * (3 << 20)}, path)
    assert [one.key for one in inspect(path, Limits(memory=1 << 20)).tensors] == ["w"]
    with pytest.raises(PickleLimitError, match=rf"^{path}: .*: use torch\.load"):
        inspect(path, Limits(memory=1000))
