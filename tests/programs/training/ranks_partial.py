"""A rank that resumes parts of a checkpoint. Arguments: folder, `first` or `again`."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from support.ranks import join
from torch import nn

from fastserial import Checkpointer
from fastserial.distributed.ranks.group import traffic_of
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


def first(folder: Path, rank: int) -> dict[str, Any]:
    state = {"model": model(1, "body", "head"), "epoch": 3, "loose": torch.ones(3)}
    each = {"loader": Loader(10 + rank, 100 + rank * 5000)}
    with Checkpointer(folder, state, per_rank=each, timeout=60) as made:
        assert made.check()
        plans: list[Any] = []
        for step in (1, 2):
            torch.randn(3)  # other states of the generators: the plan stays in force
            made.save(step)
            made.wait()
            kept: Any = traffic_of(None, 60).kept["zip"]
            plans.append(kept.made)
            traffic_of(None, 60).agree()
    assert plans[0] is plans[1]
    each = {"loader": Loader(0, 0)}
    with Checkpointer(folder, state, per_rank=each, timeout=60) as made:
        assert made.resume() == 2
    found: dict[str, Any] = {"loader": [each["loader"].at, 100 + rank]}
    assert len(each["loader"].seen) == 100 + rank * 5000
    state = {"model": model(0, "body", "tail"), "new": 1}
    with Checkpointer(folder, state, timeout=60) as made:
        try:
            made.resume(only=["model"])
        except LoadMismatchError as error:
            found["refused"] = f"{type(error).__name__}: {error}"
        assert all(one.eq(0).all() for one in state["model"].parameters())
        assert made.resume(strict=False) == 2
        assert made.resumed is not None
        found["missing"], found["unused"] = map(list, (made.resumed.missing, made.resumed.unused))
    found["parts"] = [one.mean().item() for one in state["model"].parameters()]
    state = {"net": model(0, "core", "head"), "at": 0, "loose": torch.zeros(3)}
    with Checkpointer(folder, state, timeout=60) as made:
        assert made.resume(rename={"model.body": "net.core", "model": "net", "epoch": "at"}) == 2
    found["renamed"] = [*(one.mean().item() for one in state["net"].parameters()), state["at"]]
    return found


def again(folder: Path, rank: int) -> dict[str, Any]:
    """On another number of ranks."""
    each = {"loader": Loader(0, 0)}
    state = {"model": model(0, "body", "head"), "epoch": 0, "loose": torch.zeros(3)}
    found: dict[str, Any] = {}
    with Checkpointer(folder, state, per_rank=each, timeout=60) as made:
        try:
            made.resume()
        except LoadMismatchError as error:
            found["refused"] = str(error)
        assert made.resume(strict=False) == 2
        assert made.resumed is not None
        found["missing"] = list(made.resumed.missing)
    return {**found, "loader": each["loader"].at}


def main() -> None:
    rank, _ = join()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    work = {"first": first, "again": again}[sys.argv[2]]
    print(json.dumps(work(Path(sys.argv[1]), rank)))


main()
