"""Checkpoints that each rank completes for itself (`use_collectives=False`, since torch 2.8)."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.damage import flip
from torch.distributed.checkpoint.api import CheckpointException

from fastserial.distributed import FastStorageReader, FastStorageWriter
from fastserial.distributed.dcp.folder import ShardFolder
from fastserial.errors import CorruptCheckpointError, WriteError

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),  # that this is one process
    pytest.mark.skipif(
        "use_collectives" not in inspect.signature(dcp.save).parameters,
        reason="dcp.save of this torch has no use_collectives",
    ),
]


def save(value: int, path: Path, writer: Any = FastStorageWriter, *, alone: bool = False) -> None:
    state = {"a": torch.full((1000,), value)}
    dcp.save(state, storage_writer=writer(path), use_collectives=not alone)


def load(path: Path) -> int:
    found = {"a": torch.zeros(1000, dtype=torch.int64)}
    dcp.load(found, storage_reader=FastStorageReader(path))
    return int(found["a"][0])


def test_one_of_all_ranks_replaces_those_of_single_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[int] = []
    drop, sweep = ShardFolder.drop_lone_metadata, ShardFolder.sweep

    def dropping(folder: ShardFolder) -> None:
        loaded.append(load(tmp_path))
        drop(folder)
        loaded.append(load(tmp_path))

    def sweeping(folder: ShardFolder, rank: int | None) -> None:
        sweep(folder, rank)
        loaded.append(load(tmp_path))

    save(2, tmp_path, alone=True)
    (tmp_path / "__1.metadata").write_bytes((tmp_path / "__0.metadata").read_bytes())
    (tmp_path / "__2.metadata").mkdir()  # no save made it
    monkeypatch.setattr(ShardFolder, "drop_lone_metadata", dropping)
    monkeypatch.setattr(ShardFolder, "sweep", sweeping)
    save(3, tmp_path)
    assert loaded == [2, 3, 3, 3], "the old checkpoint or the new one"
    monkeypatch.undo()
    (tmp_path / "__2.metadata").rmdir()
    save(4, tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".metadata", "__0_0.distcp"]


def test_those_of_single_ranks_do_not_hide_behind_one_of_all(tmp_path: Path) -> None:
    save(1, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(WriteError, match="save into another folder, or remove this file"):
        save(2, tmp_path, alone=True)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / ".metadata").unlink()  # as it says
    save(2, tmp_path, alone=True)
    assert load(tmp_path) == 2


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, FastStorageWriter])
def test_a_damaged_one_of_all_ranks_does_not_end_in_an_older_one(
    writer: Any, tmp_path: Path
) -> None:
    save(1, tmp_path, writer, alone=True)
    older = (tmp_path / "__0.metadata").read_bytes()
    save(2, tmp_path, writer)
    (tmp_path / "__0.metadata").write_bytes(older)  # of ours, no save leaves it there
    reader = FastStorageReader(tmp_path)
    assert "a" in reader.read_metadata(rank=0).state_dict_metadata
    if writer is dcp.FileSystemWriter:
        os.truncate(tmp_path / ".metadata", 200)
    else:
        flip(tmp_path / ".metadata", 200)
        with pytest.raises(CorruptCheckpointError, match="CRC-32"):
            reader.read_metadata(rank=0)
    with pytest.raises(CheckpointException):
        load(tmp_path)
