"""Numbered checkpoints: each number makes other bytes, and the bytes tell the number."""

from __future__ import annotations

import os
import random
from typing import Any

import torch

from fastserial.checkpoints.verify import verify

_SPREAD = 2_654_435_761  # every element of a tensor tells the number


def make(number: int, nbytes: int) -> dict[str, Any]:
    """Return state `number` of about `nbytes` bytes: one large, some middle, some tiny tensors."""
    sizes = [nbytes // 2, *[nbytes // 16] * 7, *[64] * 9, 0]
    tensors = {
        f"layer.{index}": torch.arange(size // 8, dtype=torch.int64).add_(number * _SPREAD + index)
        for index, size in enumerate(sizes)
    }
    return {"number": number, "nbytes": nbytes, "tensors": tensors}


def check(path: str | os.PathLike[str]) -> int:
    """Return the number of the checkpoint at a path, having checked every byte of it."""
    report = verify(path)
    assert report.ok, report
    found = torch.load(path, weights_only=True)
    expected = make(found["number"], found["nbytes"])
    assert found["tensors"].keys() == expected["tensors"].keys()
    for key, tensor in expected["tensors"].items():
        assert torch.equal(found["tensors"][key], tensor), (path, found["number"], key)
    return int(found["number"])


def is_whole(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint passes `check`: for controls, in which some must not."""
    try:
        check(path)
    except (AssertionError, OSError, RuntimeError, EOFError):
        return False
    return True


def listing(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names in a folder, hidden ones included."""
    return sorted(name for name in os.listdir(folder) if name != "lost+found")


def size_of(dice: random.Random) -> int:
    """Return a size: sometimes one buffered write, mostly several blocks of direct I/O."""
    return dice.choice([4_000, 900_000, 5 << 20, 9_000_000, 12 << 20])
