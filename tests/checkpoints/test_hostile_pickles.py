"""Pickles that were made to run code, to end the process, or to take its memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import ask

import fastserial
from fastserial import convert, inspect, verify
from fastserial.errors import ConvertError


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
