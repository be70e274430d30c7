"""Loads to the host leave devices alone: to ask torch for them begins CUDA in the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.identity import fast

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
