"""Pickles that were made to run code, to end the process, or to take its memory."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.processes import ask
from torch.distributed.checkpoint.metadata import MetadataIndex

import fastserial
from fastserial import convert, inspect, verify
from fastserial.errors import ConvertError, CorruptCheckpointError


def test_no_pickle_ends_the_process(tmp_path: Path) -> None:
    """A dictionary's key, which is hashed, is nested deeper than the stack allows."""
    found: dict[str, dict[str, str]] = ask("hostile_pickles", tmp_path)
    tools = dict.fromkeys(("inspect", "convert"), "PickleLimitError")
    files = {
        **tools,
        **dict.fromkeys(("open", "load_into"), "PickleLimitError"),
        "on ranks": "DistributedError",
    }
    assert found == {"folder": tools, "file.pt": files, "legacy.pt": files}


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder / "executed"),)


def opened(path: Path) -> torch.Tensor:
    with fastserial.open(path) as file:
        return file.get_tensor("w")


def filled(path: Path) -> torch.Tensor:
    target = {"w": torch.zeros(2)}
    fastserial.load_into(target, path)
    return target["w"]


@pytest.mark.parametrize("zipped", [True, False])
def test_no_tool_runs_a_pickle(zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    value = {"w": torch.ones(2), "evil": Evil(tmp_path)}
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    assert verify(path).ok
    assert any(name.endswith(".mkdir") for name in inspect(path).imports)
    assert torch.equal(opened(path), value["w"])
    assert torch.equal(filled(path), value["w"])
    with pytest.raises(ConvertError, match=r"x\.pt"):
        convert(path, tmp_path / "y.pt")
    assert os.listdir(tmp_path) == ["x.pt"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        dcp.save({"a": torch.ones(3), "n": [1, torch.ones(2)]}, checkpoint_id=tmp_path)
    return tmp_path


def change(folder: Path, how: Any) -> None:
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    how(metadata)
    path.write_bytes(pickle.dumps(metadata))


def no_properties(metadata: Any) -> None:
    metadata.state_dict_metadata["a"].properties = torch.Size([])


def odd_key(metadata: Any) -> None:
    place = metadata.storage_data.pop(MetadataIndex("a", torch.Size([0])))
    metadata.storage_data[MetadataIndex(("a",), torch.Size([0]))] = place  # type: ignore[arg-type]


@pytest.mark.parametrize("how", [no_properties, odd_key])
def test_metadata_of_other_types(how: Any, folder: Path) -> None:
    change(folder, how)
    with pytest.raises(CorruptCheckpointError, match="no metadata of"):
        inspect(folder)


def test_a_list_is_not_longer_than_its_entries(folder: Path, tmp_path: Path) -> None:
    """An index of 2^40 in the planner's data makes no list of as many entries."""

    def how(metadata: Any) -> None:
        metadata.planner_data["n.1"] = ("n", 1 << 40)

    change(folder, how)
    convert(folder, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt")["n.1"].tolist() == [1, 1]
