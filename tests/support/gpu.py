"""What the tests in tests/gpu need of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

DEVICE = "cuda"
_DRIVER = Path("/proc/driver/nvidia/version")


def _missing() -> str | None:
    """Return what keeps these tests from this machine, None if nothing does."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "a torch that is built for CUDA (this one is for CPUs)"
    if torch.version.hip is None and not _DRIVER.exists():
        return f"NVIDIA's driver ({_DRIVER} is not there)"
    if not torch.cuda.is_available():
        return "a GPU that torch sees (torch.cuda.is_available() is False)"
    return None


def need_gpu() -> None:
    """Skip a whole module where there is none; called when it is imported."""
    what = _missing()
    if what is not None:
        pytest.skip(f"needs {what}", allow_module_level=True)
