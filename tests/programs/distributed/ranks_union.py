"""A rank of four, of two pipeline stages: saves what each stage has as one state. Argument: folder.

Prints how large the file is.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import join
from support.sharded import noise, split
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from fastserial import Checkpointer, distributed
from fastserial.distributed import FlatShard
from fastserial.distributed.comm.call import RankCall
from fastserial.distributed.comm.group import rank_group_of
from fastserial.distributed.state.merging import merged
from fastserial.errors import DistributedError, LoadMismatchError

MIB = 2**20
Pair = namedtuple("Pair", "first second")
FOLDER = Path(sys.argv[1])
RANK, COUNT = join()
STAGE = RANK // 2


def saved(state: Any, path: Path, whole: Any) -> None:
    """Save as a union, with a new plan and the one that was kept, and compare with stock."""
    for _ in range(2):
        distributed.save(state, path, timeout=30, merge="union")
    if RANK == 0:
        stock = path.parent / "stock" / path.name
        stock.parent.mkdir(exist_ok=True)
        torch.save(whole, stock)
        assert path.read_bytes() == stock.read_bytes()
    dist.barrier()


def stage(number: int, rank: int | None, mesh: Any) -> dict[str, Any]:
    """Return what a rank of a stage has; all of it if `rank` is None."""
    weight = noise([301, 70], torch.float32, number)
    wide = noise([64, 2 * MIB // 64], torch.bfloat16, 10 + number)
    flat = noise([9, 5], torch.float32, 20 + number)
    large = noise([3 * MIB], torch.uint8, 30 + number)
    found: dict[str, Any] = OrderedDict()
    found[f"{number}.weight"] = weight if rank is None else split(weight, mesh, [Shard(0)])
    found[f"{number}.wide"] = wide if rank is None else split(wide, mesh, [Shard(1)])
    if rank is None:
        found[f"{number}.flat"] = flat
    else:
        first, stop = (0, 20) if rank % 2 == 0 else (20, 45)
        local = flat.flatten()[first:stop].clone()
        found[f"{number}.flat"] = FlatShard((9, 5), flat.dtype, first, stop - first, local)
    found[f"{number}.large"] = large
    found[f"{number}.tail"] = large[100:]  # one storage for two tensors
    found[f"{number}.small"] = torch.nn.Parameter(noise([7], torch.float64, 40 + number))
    found[f"{number}.tied"] = found[f"{number}.small"]
    found["step"] = 3
    found["shared"] = noise([2 * MIB], torch.uint8, 50)
    return found


def tied() -> None:
    """A tensor with several keys is the same one under all of them, and each rank has it once."""
    tensor, comm = torch.ones(4), rank_group_of(None)
    comm.begin(30, RankCall("a test"))
    with comm.propagate_errors():
        found = merged({"a": tensor, "b": tensor, "c": [tensor]}, comm)
    assert found["a"] is found["b"] is found["c"][0]
    assert found["a"].ranks == [0, 1, 2, 3]


def states(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
    state = {
        "model": stage(STAGE, RANK, mesh),
        f"only {STAGE}": [STAGE, {"a": 1.5}],
        "both": [Pair(STAGE, {STAGE: 2.5}), STAGE],
    }
    with pytest.raises(DistributedError, match=r"(?s)\Arank 2:.*union"):
        distributed.save(state, path, timeout=30)
    model = stage(0, None, mesh)
    for key, value in stage(1, None, mesh).items():
        model.setdefault(key, value)
    whole: dict[str, Any] = {"model": model, "only 0": [0, {"a": 1.5}]}
    whole |= {"both": [Pair(0, {0: 2.5, 1: 2.5}), 0], "only 1": [1, {"a": 1.5}]}
    saved(state, path, whole)
    with pytest.raises(LoadMismatchError, match="x: ranks 0 and 2 have different tensors"):
        distributed.save({"x": torch.ones(4 + STAGE)}, path, timeout=30, merge="union")
    mine = path.with_name(f"of {RANK}.pt")  # files of the ranks, as torch_checkpointing leaves them
    shards = {key: state["model"][key] for key in (f"{STAGE}.weight", f"{STAGE}.wide", "step")}
    torch.save(shards, mine)
    keys = ("0.weight", "0.wide", "step", "1.weight", "1.wide")
    loaded = torch.load(mine, weights_only=False)
    saved(loaded, path.with_name("together.pt"), {key: model[key] for key in keys})


def stages_change(path: Path) -> None:
    """A tensor moves to another pipeline stage: the plan of the last save does not count."""
    pairs = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])]
    for size in (30, 400_000):
        whole = {f"p{index}": torch.full((size,), float(index)) for index in range(4)}
        for cuts in ((0, 2, 3, 4, 4), (0, 1, 3, 4, 4), (0, 1, 2, 4, 4)):
            names = list(whole)[cuts[RANK] : cuts[RANK + 1]]
            saved({name: whole[name] for name in names}, path, whole)
        for which in ((0, 0, 1), (0, 1, 1)):
            state = {}
            for index, number in enumerate(which):
                if RANK in pairs[number].mesh.tolist():
                    state[f"p{index}"] = split(whole[f"p{index}"], pairs[number], [Shard(0)])
            saved(state, path, {f"p{index}": whole[f"p{index}"] for index in range(3)})


class Stage(torch.nn.Module):
    """A stage of a pipeline, with the names that its layers have in the whole model."""

    def __init__(self, *numbers: int) -> None:
        super().__init__()
        for number in numbers:
            torch.manual_seed(number)
            self.add_module(str(number), torch.nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def state_of(model: Stage, *rates: Any) -> dict[str, Any]:
    groups = [
        {"params": layer.parameters(), "lr": rate}
        for layer, rate in zip(model.children(), rates, strict=True)
    ]
    return {"model": model, "optimizer": torch.optim.AdamW(groups, betas=(0.8, 0.9))}


def train(state: dict[str, Any]) -> None:
    state["model"](torch.ones(2, 6)).sum().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Train both a step, and compare the weights."""
    train(one)
    train(other)
    return all(map(torch.equal, one["model"].parameters(), other["model"].parameters()))


def optimizers(path: Path) -> None:
    """The groups of all stages are in the file, and each parameter gets its own settings again."""
    state = state_of(Stage(STAGE), 0.1 + STAGE)
    train(state)
    distributed.save(state, path, merge="union")
    groups = torch.load(path)["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == [0.1, 1.1]
    assert [group["params"] for group in groups] == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]
    again = state_of(Stage(STAGE), 5.0)
    distributed.load(path, into=again)
    assert same(state, again)
    both = state_of(Stage(0, 1), 5.0, 6.0)
    distributed.load(path, into=both)
    assert [group["lr"] for group in both["optimizer"].param_groups] == [0.1, 1.1]
    one_group = torch.optim.AdamW(both["model"].parameters(), lr=5.0)
    with pytest.raises(LoadMismatchError, match="several values of 'lr'"):
        distributed.load(path, into={**both, "optimizer": one_group})
    equal = state_of(Stage(STAGE), 0.5)  # on all: one group, as the whole model's
    distributed.save(equal, path, merge="union")
    (group,) = torch.load(path)["optimizer"]["param_groups"]
    assert group["params"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def checkpointer(folder: Path) -> None:
    """A Checkpointer of stages: each rank resumes what it had, bit for bit."""
    first, again = ({**state_of(Stage(STAGE), 0.1 + STAGE), "epoch": 1} for _ in range(2))
    with Checkpointer(folder, first, merge="union", timeout=30) as made:
        train(first)
        made.save(1)
    again["optimizer"].param_groups[0].update(lr=7.0, betas=(0.1, 0.1))
    with Checkpointer(folder, again, merge="union", timeout=30) as made:
        assert made.resume() == 1
    assert same(first, again)
    with (
        pytest.raises(DistributedError, match="union"),
        Checkpointer(folder, first, timeout=30) as made,
    ):
        made.save(2)


class Box:
    """Not looked into: what it holds is rank 0's, as without a union."""

    def __init__(self) -> None:
        self.tensor, self.name = torch.full((3,), float(RANK)), "box"


def boxed(path: Path) -> None:
    distributed.save({"box": Box(), f"of{RANK}": 1}, path, timeout=30, merge="union")
    box = torch.load(path, weights_only=False)["box"]
    assert torch.equal(box.tensor, torch.zeros(3))


tied()
boxed(FOLDER / "boxed.pt")
states(FOLDER / "file.pt")
stages_change(FOLDER / "moving.pt")
optimizers(FOLDER / "optimizers.pt")
checkpointer(FOLDER / "stages")
print((FOLDER / "file.pt").stat().st_size)
