"""The storage for torch_checkpointing (`pip install torch-checkpointing`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.damage import flip
from support.nests import differing

import fastserial
from fastserial.checkpoints.verify import checkpoints_in

package = pytest.importorskip("torch_checkpointing", reason="torch-checkpointing is not installed")

from fastserial.integrations.torch_checkpointing import FastStorageConfig  # noqa: E402


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"weights": torch.randn(300, 1000), "small": torch.arange(7), "step": 3}


def same(found: Any, expected: Any) -> bool:
    return not differing(found, expected)


def manager(storage: Any) -> Any:
    config = package.CheckpointManager.Config.with_sync_save()
    config.storage_config = storage
    return config.build()


def test_files_are_those_of_torch(tmp_path: Path) -> None:
    storage = FastStorageConfig().create_storage()
    with storage.get_write_stream(tmp_path / "a.pt", state()) as file:
        torch.save(state(), file)
    report = fastserial.last_save_report()
    assert report is not None
    assert report.durable
    assert same(torch.load(tmp_path / "a.pt"), state())
    assert fastserial.verify(tmp_path / "a.pt").ok
    for whole in (True, False):
        arguments = package.storage.base_storage.ReadArgs(pre_read_full_file=whole)
        with storage.stream_read(tmp_path / "a.pt", arguments) as file:
            assert same(torch.load(file), state())
    storage.write(tmp_path / "raw", b"bytes")
    assert storage.read(tmp_path / "raw") == b"bytes"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    storage = FastStorageConfig().create_storage()
    storage.write(tmp_path / "a", b"old")
    with pytest.raises(ArithmeticError), storage.stream_write(tmp_path / "a") as file:
        file.write(b"new")
        raise ArithmeticError
    assert storage.read(tmp_path / "a") == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_renames(tmp_path: Path) -> None:
    storage = FastStorageConfig().create_storage()
    for name in ("new", "taken"):
        storage.mkdir(tmp_path / name / "inside")
    storage.rename(tmp_path / "new", tmp_path / "named", is_directory=True)
    assert storage.isdir(tmp_path / "named" / "inside")
    with pytest.raises(OSError, match="occupied"):
        storage.rename(tmp_path / "named", tmp_path / "taken", is_directory=True)


def test_a_manager_saves_and_loads_and_finds_damage(tmp_path: Path) -> None:
    one = manager(FastStorageConfig())
    one.save(str(tmp_path / "1"), {"model": state()})
    (file,) = (tmp_path / "1").glob("model*")
    assert same(torch.load(file), state())
    assert same(one.load(str(tmp_path / "1"), {"model": None})["model"], state())
    flip(file, file.stat().st_size // 2)
    with pytest.raises(Exception, match="CRC-32") as caught:
        one.load(str(tmp_path / "1"), {"model": None})
    assert str(file) in str(caught.value)
    one.close()


@pytest.mark.parametrize("storage", ["its own", "ours"])
def test_the_tools_know_its_folders(storage: str, tmp_path: Path) -> None:
    """Of one rank, as many leave them that train on one GPU."""
    its_own = package.storage.filesystem.LocalFileSystemStorageConfig(use_direct_io=False)
    one = manager(its_own if storage == "its own" else FastStorageConfig())
    one.save(str(tmp_path / "1"), {"model": state(), "step_1": 3})
    one.close()
    names = ["model_0.pt", "step_1_0.pt"]
    assert [os.path.basename(path) for path in checkpoints_in(tmp_path)] == names
    with pytest.raises(fastserial.errors.UnreadableCheckpointError, match="give a file"):
        fastserial.convert(tmp_path / "1", tmp_path / "file.pt")
    fastserial.convert(tmp_path / "1" / "model_0.pt", tmp_path / "file.pt")
    assert same(torch.load(tmp_path / "file.pt"), state())
