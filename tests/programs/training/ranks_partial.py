"""A rank that resumes parts of a checkpoint. Arguments: folder, `first` or `again`.

Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import join
from torch import nn

from fastserial import Checkpointer
from fastserial.errors import LoadMismatchError

WIDTH = 520  # a weight has more than 1 MiB: every rank writes a part of it


class Loader:
    """Has a state of another size on each rank."""

    def __init__(self, at: int, length: int) -> None:
        self.at, self.seen = at, torch.zeros(length)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.seen = state["at"], state["seen"]


def model(number: float, *names: str) -> nn.Module:
    made = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False) for name in names})
    for one in made.parameters():
        nn.init.constant_(one, number)
    return made


def means(module: nn.Module) -> list[float]:
    return [one.mean().item() for one in module.parameters()]


def first(folder: Path, rank: int) -> dict[str, Any]:
    state = {"model": model(1, "body", "head"), "epoch": 3, "loose": torch.ones(3)}
    each = {"loader": Loader(10 + rank, 100 + rank * 5000)}
    with Checkpointer(folder, state, per_rank=each, timeout=60) as made:
        for step in (1, 2):
            torch.randn(3)  # other states of the generators
            made.save(step)
    each = {"loader": Loader(0, 0)}
    with Checkpointer(folder, state, per_rank=each, timeout=60) as made:
        assert made.resume() == 2
    found: dict[str, Any] = {"loader": [each["loader"].at, len(each["loader"].seen)]}
    state = {"model": model(0, "body", "tail"), "new": 1}
    with Checkpointer(folder, state, timeout=60) as made:
        with pytest.raises(LoadMismatchError):
            made.resume(only=["model"])
        assert means(state["model"]) == [0, 0]
        assert made.resume(strict=False) == 2
        assert made.resumed is not None
        found["missing"], found["unused"] = map(list, (made.resumed.missing, made.resumed.unused))
    found["parts"] = means(state["model"])
    state = {"net": model(0, "core", "head"), "at": 0, "loose": torch.zeros(3)}
    with Checkpointer(folder, state, timeout=60) as made:
        assert made.resume(rename={"model.body": "net.core", "model": "net", "epoch": "at"}) == 2
    found["renamed"] = [*means(state["net"]), state["at"]]
    return found


def again(folder: Path, rank: int) -> dict[str, Any]:
    """On another number of ranks."""
    each = {"loader": Loader(0, 0)}
    state = {"model": model(0, "body", "head"), "epoch": 0, "loose": torch.zeros(3)}
    with Checkpointer(folder, state, per_rank=each, timeout=60) as made:
        with pytest.raises(LoadMismatchError, match="by another number of ranks"):
            made.resume()
        assert made.resume(strict=False) == 2
        assert made.resumed is not None
        return {"missing": list(made.resumed.missing), "loader": each["loader"].at}


rank, _ = join()
torch.set_num_threads(1)
warnings.simplefilter("ignore")
print(json.dumps({"first": first, "again": again}[sys.argv[2]](Path(sys.argv[1]), rank)))
