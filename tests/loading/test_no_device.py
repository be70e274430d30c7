"""Loads to the host leave devices alone: to ask torch for them begins CUDA in the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.identity import fast

from fastserial.formats.source import DescriptorSource
from fastserial.formats.zip_format import read_directory
from fastserial.memory.devices import device_names
from fastserial.patching import load_hooks
from fastserial.training.rank_values import generator_states

OPTIONS: dict[str, Any] = {"small_file": 0, "durable": False}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note who asks whether there is a device."""
    found: list[str] = []
    for module, name in (
        (torch.cuda, "is_available"),
        (torch.cuda, "device_count"),
        (torch.accelerator, "is_available"),
        (torch.accelerator, "device_count"),
    ):
        monkeypatch.setattr(module, name, lambda name=name: found.append(name) or 0)
    return found


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize(
    "place",
    [None, "cpu", torch.device("cpu"), {}, {"cuda:0": "cpu"}, lambda storage, location: storage],
)
def test_to_the_host(tmp_path: Path, asked: list[str], zipped: bool, place: Any) -> None:
    wanted = {"a": torch.randn(500_000), "b": torch.randn(3)}
    with fast(**OPTIONS):
        torch.save(wanted, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
        loaded = torch.load(tmp_path / "a.pt", map_location=place)
    assert torch.equal(loaded["a"], wanted["a"])
    assert asked == []


@pytest.mark.parametrize(
    ("value", "nbytes", "names"),
    [
        ("cuda:0", 1 << 30, True),
        ("cpu", 1 << 30, False),
        ("cuda:0", 1 << 10, False),  # so much of the file is its pickle
    ],
)
def test_devices_that_a_file_names(tmp_path: Path, value: str, nbytes: int, names: bool) -> None:
    assert b"cuda" in device_names()
    torch.save(value, tmp_path / "a.pt")
    with open(tmp_path / "a.pt", "rb") as file:
        directory = read_directory(DescriptorSource(file.fileno()))
    stock = torch._C.PyTorchFileReader(str(tmp_path / "a.pt"))
    assert load_hooks._names_device(None, stock, directory, nbytes) is names
    mapped = load_hooks._names_device({"cpu": value}, stock, directory, nbytes)
    assert mapped is (nbytes == 1 << 30)


def test_generators(asked: list[str]) -> None:
    assert "cuda" not in generator_states()
    assert asked == []
