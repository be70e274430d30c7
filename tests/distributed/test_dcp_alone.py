"""Checkpoints that each rank completes for itself (`use_collectives=False`, since torch 2.8)."""

from __future__ import annotations

import inspect
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.damage import flip
from torch.distributed.checkpoint.api import CheckpointException

from fastserial.distributed import FastStorageReader, FastStorageWriter
from fastserial.errors import ConfigError, CorruptCheckpointError

pytestmark = pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters,
    reason="dcp.save of this torch has no use_collectives",
)


def save(value: int, path: Path, writer: Any = FastStorageWriter, *, alone: bool = False) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        dcp.save(
            {"a": torch.full((1000,), value)},
            storage_writer=writer(path),
            use_collectives=not alone,
        )


def load(path: Path) -> int:
    found = {"a": torch.zeros(1000, dtype=torch.int64)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, storage_reader=FastStorageReader(path))
    return int(found["a"][0])


def test_they_are_left_to_stock(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no_dist=True; or use torch's FileSystemWriter"):
        save(1, tmp_path, alone=True)
    assert not os.listdir(tmp_path)
    save(1, tmp_path, dcp.FileSystemWriter, alone=True)
    assert load(tmp_path) == 1


def test_a_save_of_all_ranks_beside_them(tmp_path: Path) -> None:
    """It is the one that is loaded, and leaves them whole."""
    save(1, tmp_path, dcp.FileSystemWriter, alone=True)
    for value in (2, 3):
        save(value, tmp_path)
        assert load(tmp_path) == value
    (tmp_path / ".metadata").unlink()
    assert load(tmp_path) == 1


@pytest.mark.parametrize("writer", [dcp.FileSystemWriter, FastStorageWriter])
def test_a_damaged_one_of_all_ranks_does_not_end_in_an_older_one(
    writer: Any, tmp_path: Path
) -> None:
    save(1, tmp_path, dcp.FileSystemWriter, alone=True)
    save(2, tmp_path, writer)
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
