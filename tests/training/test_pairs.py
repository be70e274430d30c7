"""What one process does with a file and an object, ranks do, or raise the same class."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
import torch
from support import ranks
from support.own_loading import Versioned
from torch import nn

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


@pytest.mark.parametrize("merge", ["", "union"])
def test_one_process_does_not_convert_what_ranks_saved(tmp_path: Path, merge: str) -> None:
    """Their files have the versions of modules, in the names that one process gives them."""
    ranks.run("ranks_versions", 2, tmp_path, *merge.split())
    inside = nn.Sequential(Versioned(2, 2), nn.BatchNorm1d(2))
    cases: list[tuple[str, nn.Module, dict[str, int]]] = [
        ("m", nn.Sequential(inside), {"": 1, "0": 1, "0.0": 2, "0.1": 2})
    ]
    if merge:
        stages = nn.ModuleDict({str(rank): nn.BatchNorm1d(4) for rank in range(2)})
        cases.append(("stage", stages, {"": 1, "0": 2, "1": 2}))
        stages = nn.ModuleDict({str(rank): Versioned(2, 2) for rank in range(2)})
        cases.append(("custom", stages, {"": 1, "0": 2, "1": 2}))
    for name, module, expected in cases:
        with Checkpointer(tmp_path, {name: module}) as checkpointer:
            assert checkpointer.resume(only=[name]) == 1
        found = torch.load(tmp_path / "step-00000001.pt")[name]
        assert {key: one["version"] for key, one in found._metadata.items()} == expected
        for one in module.modules():
            if isinstance(one, Versioned | nn.BatchNorm1d) and one is not inside[1]:
                assert (one.weight == 3.0).all()  # type: ignore[union-attr, operator]
