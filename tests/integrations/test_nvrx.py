"""NVRx's persistent worker (`pip install nvidia-resiliency-ext`), a spawned process that saves."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from support.processes import run

import fastserial

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nvidia_resiliency_ext") is None,
    reason="nvidia-resiliency-ext is not installed",
)


@pytest.mark.parametrize("switched_on", [True, False])
def test_its_worker_is_patched_as_its_parent_is(switched_on: bool, tmp_path: Path) -> None:
    path = tmp_path / "saved.pt"
    switch = {"FASTSERIAL": str(int(switched_on))}
    found = json.loads(run("nvrx_saves", path, variables=switch).out)
    assert not found["own"]
    assert (found["engine"], found["patched"]) == (
        ("threads", True) if switched_on else (None, False)
    )
    torch.manual_seed(0)
    assert torch.equal(torch.load(path)["weights"], torch.randn(4, 1 << 20))
    assert fastserial.verify(path).ok
