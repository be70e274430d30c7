"""A Hugging Face folder, written by one process: what is in place stays, what is not goes."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastserial import WriteError, distributed
from fastserial.distributed.save import safetensors
from fastserial.errors import ConfigError, DistributedError

MOST = 50_000
INDEX = "model.safetensors.index.json"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(100, 200), nn.Linear(200, 300), nn.Linear(300, 3))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_with_a_checkpoint_is_refused(tmp_path: Path) -> None:
    distributed.save(model(), tmp_path, format="safetensors", shard_nbytes=MOST)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert INDEX in before
    for most in (MOST, 10**9):
        with pytest.raises(DistributedError, match="holds a checkpoint"):
            distributed.save(model(), tmp_path, format="safetensors", shard_nbytes=most)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_one_file_is_replaced_by_one_file_only(tmp_path: Path) -> None:
    """transformers reads `model.safetensors` before an index: it must not stay beside one."""
    distributed.save(model(), tmp_path, format="safetensors")
    distributed.save(model(), tmp_path, format="safetensors")
    assert names(tmp_path) == ["model.safetensors"]
    with pytest.raises(DistributedError, match="holds a checkpoint"):
        distributed.save(model(), tmp_path, format="safetensors", shard_nbytes=MOST)
    assert names(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("in_place", [True, False])
def test_an_error_at_the_index(
    in_place: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is in place nothing is left; afterwards the checkpoint is whole, and stays."""
    replace = safetensors.replace_bytes

    def failing(path: str, data: bytes, durable: bool) -> None:
        if in_place:
            replace(path, data, durable)
        raise WriteError(errno.EIO, "failed", path)

    monkeypatch.setattr(safetensors, "replace_bytes", failing)
    with pytest.raises(DistributedError):
        distributed.save(model(), tmp_path, format="safetensors", shard_nbytes=MOST)
    assert (INDEX in names(tmp_path)) is in_place
    assert bool(names(tmp_path)) is in_place
    if in_place:
        state = {key: torch.zeros_like(one) for key, one in model().state_dict().items()}
        distributed.load(tmp_path, state)
        assert all(torch.equal(state[key], one) for key, one in model().state_dict().items())


def test_an_index_that_names_no_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    with pytest.raises(DistributedError, match=r"index\.json: it names no file"):
        distributed.load(tmp_path, {})


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"a": [1]}, "holds tensors by their"),
        ({"a": torch.zeros(2, dtype=torch.complex128)}, "safetensors has no complex128"),
        ([torch.zeros(2)], "a dictionary of tensors"),
    ],
)
def test_what_safetensors_cannot_hold(state: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        distributed.save(state, tmp_path / "folder", format="safetensors")
    assert not (tmp_path / "folder").exists()
