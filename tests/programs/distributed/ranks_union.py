"""A rank of four, of two pipeline stages: saves what each stage has as one state.

Arguments: folder.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from support.ranks import join
from support.sharded import noise, split
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from fastserial import Checkpointer, distributed
from fastserial.distributed import FlatShard
from fastserial.errors import DistributedError, LoadMismatchError

MIB = 2**20


def stage(number: int, rank: int | None, mesh: Any) -> dict[str, Any]:
    """Return what a rank of a stage has; all of it if `rank` is None."""
    weight = noise([301, 70], torch.float32, number)
    wide = noise([64, 2 * MIB // 64], torch.bfloat16, 10 + number)
    flat = noise([9, 5], torch.float32, 20 + number)
    large = noise([3 * MIB], torch.uint8, 30 + number)
    small = noise([7], torch.float64, 40 + number)
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
    found[f"{number}.small"] = torch.nn.Parameter(small)
    found["step"] = 3
    found["shared"] = noise([2 * MIB], torch.uint8, 50)
    return found


class Stage(torch.nn.Module):
    """A stage of a pipeline, with the names that its layers have in the whole model."""

    def __init__(self, numbers: list[int]) -> None:
        super().__init__()
        for number in numbers:
            torch.manual_seed(number)
            self.add_module(str(number), torch.nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def optimizer_of(stage: Stage, rates: list[float]) -> torch.optim.Optimizer:
    groups = [
        {"params": layer.parameters(), "lr": rate}
        for layer, rate in zip(stage.children(), rates, strict=True)
    ]
    return torch.optim.AdamW(groups, betas=(0.8, 0.9))


def train(stage: Stage, optimizer: torch.optim.Optimizer) -> None:
    stage(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def refuses_one_group(path: Path, whole: Stage) -> None:
    """Make sure that groups with different settings are not put into one."""
    one_group = torch.optim.AdamW(whole.parameters(), lr=5.0)
    refused = ""
    try:
        distributed.load(path, into={"model": whole, "optimizer": one_group})
    except LoadMismatchError as error:
        refused = str(error)
    assert "several values of 'lr'" in refused, refused


def optimizers(path: Path, number: int) -> None:
    """The groups of all stages are in the file, and each parameter gets its own settings again."""
    stage = Stage([number])
    optimizer = optimizer_of(stage, [0.1 + number])
    train(stage, optimizer)
    distributed.save({"model": stage, "optimizer": optimizer}, path, merge="union")
    whole = torch.load(path)["optimizer"]["param_groups"]
    assert [group["lr"] for group in whole] == [0.1, 1.1]
    assert [group["params"] for group in whole] == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]

    again = Stage([number])
    settings = optimizer_of(again, [5.0])
    distributed.load(path, into={"model": again, "optimizer": settings})
    for each in (stage, optimizer), (again, settings):
        train(*each)
    for mine, other in zip(stage.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, other)

    both = Stage([0, 1])
    settings = optimizer_of(both, [5.0, 6.0])
    distributed.load(path, into={"model": both, "optimizer": settings})
    assert [group["lr"] for group in settings.param_groups] == [0.1, 1.1]
    refuses_one_group(path, both)

    with_tensor = torch.optim.AdamW(stage.parameters(), lr=torch.tensor(0.1 + number))
    train(stage, with_tensor)
    distributed.save({"model": stage, "optimizer": with_tensor}, path, merge="union")
    refuses_one_group(path, both)

    optimizer = optimizer_of(stage, [0.5])  # equal on all: one group, as the whole model's
    distributed.save({"model": stage, "optimizer": optimizer}, path, merge="union")
    whole = torch.load(path)["optimizer"]["param_groups"]
    assert [group["params"] for group in whole] == [["0.weight", "0.bias", "1.weight", "1.bias"]]


def checkpointer(folder: Path, number: int) -> None:
    """A Checkpointer of stages: each rank resumes what it had, bit for bit."""
    stage, again = Stage([number]), Stage([number])
    ways = {}
    for name, one in (("first", stage), ("again", again)):
        state = {"model": one, "optimizer": optimizer_of(one, [0.1 + number]), "epoch": 1}
        ways[name] = state
    with Checkpointer(folder, ways["first"], merge="union", timeout=30) as made:
        train(stage, ways["first"]["optimizer"])
        assert made.check()
        made.save(1)
    train(stage, ways["first"]["optimizer"])
    ways["again"]["optimizer"].param_groups[0].update(lr=7.0, betas=(0.1, 0.1))
    with Checkpointer(folder, ways["again"], merge="union", timeout=30) as made:
        assert made.resume() == 1
    train(again, ways["again"]["optimizer"])
    for mine, other in zip(stage.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, other)
    refused = ""
    try:
        with Checkpointer(folder, ways["first"], timeout=30) as made:
            made.save(2)
    except DistributedError as error:
        refused = str(error)
    assert "union" in refused, refused


def main() -> None:
    rank, count = join()
    assert count == 4
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
    number = rank // 2
    path = Path(sys.argv[1]) / "file.pt"
    state = {"model": stage(number, rank, mesh), f"only {number}": [number, {"a": 1.5}]}
    told = ""
    try:
        distributed.save(state, path, timeout=30)
    except DistributedError as error:
        told = str(error)
    assert told.startswith("rank 2:"), told
    assert "union" in told, told
    for _ in range(2):
        distributed.save(state, path, timeout=30, merge="union")
    optimizers(path.with_name("optimizers.pt"), number)
    checkpointer(path.with_name("stages"), number)
    if rank == 0:
        model = stage(0, None, mesh)
        for key, value in stage(1, None, mesh).items():
            model.setdefault(key, value)
        whole = {"model": model, "only 0": [0, {"a": 1.5}], "only 1": [1, {"a": 1.5}]}
        stock = path.parent / "stock" / "file.pt"
        stock.parent.mkdir()
        torch.save(whole, stock)
        assert path.read_bytes() == stock.read_bytes()
        print(path.stat().st_size)


main()
