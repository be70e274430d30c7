"""Saves beside the program: what the tests of this folder share is in `support.beside`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.beside import gate, nothing_left  # noqa: F401


@pytest.fixture
def state() -> dict[str, Any]:
    """About 2 MB, larger and smaller tensors, and what is no tensor."""
    torch.manual_seed(5)
    return {
        "weights": [torch.randn(100_000) for _ in range(5)],
        "small": [torch.randn(7) for _ in range(9)],
        "step": 3,
    }
