"""Pickles that were made to run code, to end the process, or to take its memory."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.loading import filled, opened
from support.processes import ask

from fastserial import convert, inspect, verify
from fastserial.errors import ConvertError, CorruptCheckpointError


def test_no_pickle_ends_the_process(tmp_path: Path) -> None:
    """A dictionary's key, which is hashed, is nested deeper than the stack allows."""
    found: dict[str, dict[str, str]] = ask("hostile_pickles", tmp_path)
    tools = {"inspect": "PickleLimitError", "convert": "ConvertError"}
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


@pytest.mark.parametrize("zipped", [True, False])
def test_no_tool_runs_a_pickle(zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    value = {"w": torch.ones(2), "evil": Evil(tmp_path)}
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    assert verify(path).ok
    assert any(name.endswith(".mkdir") for name in inspect(path).imports)
    assert torch.equal(opened(path)["w"], value["w"])
    assert torch.equal(filled({"w": torch.zeros(2)}, path)["w"], value["w"])
    with pytest.raises(ConvertError, match=r"x\.pt"):
        convert(path, tmp_path / "y.pt")
    assert os.listdir(tmp_path) == ["x.pt"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_no_pickle_of_a_folder_is_run(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path)))
    (tmp_path / "a" / "__0_0.distcp").write_bytes(b"x")
    assert verify(tmp_path / "a").status == "damaged"
    for call in (inspect, lambda path: convert(path, tmp_path / "a.pt")):
        with pytest.raises(CorruptCheckpointError):
            call(tmp_path / "a")
    dcp.save(
        {"a": torch.ones(3), "b": Evil(tmp_path)},
        storage_writer=dcp.FileSystemWriter(tmp_path / "b"),
    )
    assert verify(tmp_path / "b").status == "ok"
    assert "posix.mkdir" not in inspect(tmp_path / "b").imports
    with pytest.raises(ConvertError, match="'b' cannot be loaded under the rules of weights_only"):
        convert(tmp_path / "b", tmp_path / "b.pt")
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
