"""What the tests in tests/gpu need of a machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn

DEVICE = "cuda"
_DRIVER = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))  # some sandboxes have one


def _missing() -> str | None:
    """Return what keeps these tests from this machine, None if nothing does."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "a torch that is built for CUDA (this one is for CPUs)"
    if torch.version.hip is None and not any(map(Path.exists, _DRIVER)):
        return f"NVIDIA's driver ({_DRIVER[0]} is not there)"
    if not torch.cuda.is_available():
        return "a GPU that torch sees (torch.cuda.is_available() is False)"
    return None


def steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, count: int, width: int
) -> list[float]:
    """Train on random rows of `width` numbers, and return the losses."""
    losses = []
    for _ in range(count):
        loss = model(torch.randn(16, width, device=DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def need_gpu() -> None:
    """Skip a whole module where there is none; called when it is imported."""
    os.environ.setdefault("CUFILE_LOGFILE_PATH", os.devnull)  # else it logs into each folder
    what = _missing()
    if what is not None:
        pytest.skip(f"needs {what}", allow_module_level=True)
