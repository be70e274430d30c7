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
import torch.distributed as dist
from support.lives import Loader
from support.own_loading import Versioned
from support.ranks import join
from torch import nn

from fastserial import Checkpointer
from fastserial.errors import ConfigError, DistributedError, LoadMismatchError

REFUSED = (LoadMismatchError, DistributedError)  # here, or on another rank
WIDTH = 520  # a weight has more than 1 MiB: every rank writes a part of it


def model(number: float, *names: str) -> nn.Module:
    made = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH, bias=False) for name in names})
    for one in made.parameters():
        nn.init.constant_(one, number)
    return made


def filled(number: float) -> nn.Module:
    made = Versioned(3, 3)
    nn.init.constant_(made.weight, number)
    return made


def means(module: nn.Module) -> list[float]:
    return [one.mean().item() for one in module.parameters()]


def first(folder: Path, rank: int) -> dict[str, Any]:
    state = {"model": model(1, "body", "head"), "epoch": 3, "loose": torch.ones(3)}
    each: dict[str, Any] = {"loader": Loader(10 + rank), "n": 4}
    each["loader"].order = torch.zeros(100 + rank * 5000)  # of another size on each rank
    with Checkpointer(folder, state, per_rank=each, timeout=60) as made:
        for step in (1, 2):
            torch.randn(3)  # other states of the generators
            made.save(step)
    each = {"loader": Loader(0), "n": 0}
    with Checkpointer(folder, state, per_rank=each, timeout=60) as made:
        assert made.resume() == 2
    found: dict[str, Any] = {"loader": [each["loader"].epoch, len(each["loader"].order), each["n"]]}
    with Checkpointer(folder, state, per_rank={"other": Loader(0)}, timeout=60) as made:
        with pytest.raises(REFUSED, match="no other for this rank"):
            made.resume()
        assert made.resume(strict=False) == 2
        found["no other"] = list(made.resumed.missing_keys)
    for case in (only, not_strict, renamed):
        found[case.__name__] = case(folder)
    return found


def only(folder: Path) -> Any:
    state = {"model": model(0, "body", "head"), "epoch": 0, "loose": torch.zeros(3), "new": 1}
    generator = torch.get_rng_state()
    with Checkpointer(folder, state, timeout=60) as made:
        with pytest.raises(REFUSED, match="new"):
            made.resume()
        assert made.resume(only=["model", "epoch"]) == 2
        assert (made.resumed.step, made.resumed.path) == (2, str(folder / "step-00000002.pt"))
        for wrong, text in ((["nothing"], "nothing"), ("model", "list of names")):
            with pytest.raises(ConfigError, match=text):
                made.resume(only=wrong)
    assert torch.equal(torch.get_rng_state(), generator)
    return [*means(state["model"]), state["epoch"], state["new"], *state["loose"].tolist()]


def not_strict(folder: Path) -> Any:
    """Also where keys of a module are missing and left over."""
    state = {"model": model(0, "body", "tail"), "new": 1}
    with Checkpointer(folder, state, timeout=60) as made:
        with pytest.raises(REFUSED):
            made.resume()
        with pytest.raises(REFUSED):
            made.resume(only=["model"])
        alone = dist.get_world_size() == 1  # then torch fills what it can, and raises
        assert alone or means(state["model"]) == [0, 0]
        assert made.resume(strict=False) == 2
    return [means(state["model"]), made.resumed.missing_keys, made.resumed.unexpected_keys]


def renamed(folder: Path) -> Any:
    state = {"net": model(0, "core", "head"), "at": 0, "loose": torch.zeros(3)}
    with Checkpointer(folder, state, timeout=60) as made:
        assert made.resume(rename={"model.body": "net.core", "model": "net", "epoch": "at"}) == 2
    assert made.resumed.missing_keys == made.resumed.unexpected_keys == ()
    versions = folder / "versions"
    saved = nn.ModuleDict({"body": nn.Sequential(filled(1)), "head": filled(2)})
    with Checkpointer(versions, {"model": saved}, timeout=60) as made:
        made.save(1)
    net = nn.ModuleDict({"core": nn.Sequential(filled(0)), "head": filled(0)})
    with Checkpointer(versions, {"net": net}, timeout=60) as made:
        made.resume(rename={"model.body": "net.core", "model": "net"})
    assert [one.mean().item() for one in net.parameters() if one.dim() == 2] == [1, 2]
    return [*means(state["net"]), state["at"], *state["loose"].tolist()]


def again(folder: Path, rank: int) -> dict[str, Any]:
    """On another number of ranks."""
    each = {"loader": Loader(0)}
    state = {"model": model(0, "body", "head"), "epoch": 0, "loose": torch.zeros(3)}
    with Checkpointer(folder, state, per_rank=each, timeout=60) as made:
        with pytest.raises(LoadMismatchError, match="by another number of ranks"):
            made.resume()
        assert made.resume(strict=False) == 2
        return {"missing": list(made.resumed.missing_keys), "loader": each["loader"].epoch}


rank, _ = join()
torch.set_num_threads(1)
warnings.simplefilter("ignore")
print(json.dumps({"first": first, "again": again}[sys.argv[2]](Path(sys.argv[1]), rank)))
