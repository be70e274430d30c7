"""What one process does with a file and an object, ranks do, or raise the same class."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
import torch
from support import ranks
from support.own_loading import Versioned, spoilt

from fastserial import Checkpointer

FULL = "full" in map(os.environ.get, ("FASTSERIAL_FAULTS", "FASTSERIAL_DISTRIBUTED"))
SEED, SHARE = 1, 1.0 if FULL else 0.04  # of the pairs of modules


@cache
def alone(folder: Path) -> list[str]:
    (out,) = ranks.run("ranks_pairs", 1, folder / "alone", SEED, 1, SHARE)
    return out.splitlines()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pairs")


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_ranks_do_what_one_process_does(tmp_path: Path, shared: Path, count: int) -> None:
    expected = alone(shared)
    assert len(expected) > 30
    for out in ranks.run("ranks_pairs", count, tmp_path / "run", SEED, 0, SHARE, timeout=600):
        assert out.splitlines() == expected


def test_one_process_does_not_convert_what_ranks_saved(tmp_path: Path) -> None:
    """Their files have no versions of modules: with all keys they are of the module's own."""
    saved, module = Versioned(2, 2), spoilt(Versioned(2, 2))
    value = {"m": dict(saved.state_dict()), "checkpointer": {"version": 1, "step": 1}}
    torch.save(value, tmp_path / "step-00000001.pt")
    with Checkpointer(tmp_path, {"m": module}) as checkpointer:
        assert checkpointer.resume() == 1
    assert torch.equal(module.weight, saved.weight)  # type: ignore[arg-type]
