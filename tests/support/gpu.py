"""What the tests in tests/gpu need of a machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

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


def need_gpu() -> None:
    """Skip a whole module where there is none; called when it is imported."""
    os.environ.setdefault("CUFILE_LOGFILE_PATH", os.devnull)  # else it logs into each folder
    what = _missing()
    if what is not None:
        pytest.skip(f"needs {what}", allow_module_level=True)
