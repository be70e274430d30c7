"""A rank that saves as torch_checkpointing does. Arguments: folder; `stream` or `manager`.

Items: `placed`, tensors in many placements; `model` and `optimizer` of FSDP2; `plain`, equal on
all ranks; `own`, which each rank has for itself. A manager is torch_checkpointing's own; a stream
writes what that would.
"""

from __future__ import annotations

import random
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.ranks import join
from support.sharded import DTYPES, noise, random_dtensor, split, split_last, strided
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

SHAPES = [(8, 12), (7, 5), (3, 2), (1, 9), (0, 4), (130, 33), ()]


def placed(rank: int, count: int) -> dict[str, DTensor]:
    """Return DTensors; the first number of a key seeds the bytes of the whole."""
    line = DeviceMesh("cpu", torch.arange(count))
    found: dict[str, DTensor] = {}
    one = [Replicate(), Shard(0), Shard(1)]
    for seed, shape in enumerate(SHAPES):
        full = noise(list(shape), torch.float32, seed)
        for number, placement in enumerate(one if shape else one[:1]):
            found[f"{seed} on a line {number}"] = split(full, line, [placement])
    if count == 4:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for seed, shape in enumerate(SHAPES[:-1]):
            full = noise(list(shape), torch.float32, seed)
            for first in range(3):
                for second in range(3):
                    where = [one[first], one[second]]
                    found[f"{seed} in a square {first}{second}"] = split(full, square, where)
            found[f"{seed} FSDP over TP, rows"] = split_last(full, square, [0, 0])
            found[f"{seed} FSDP over TP, columns"] = split_last(full, square, [1, 1])
        for number in range(60):
            chance = random.Random(number)
            shape = [chance.randrange(10) for _ in range(chance.randrange(1, 5))]
            full = noise(shape, chance.choice(DTYPES), 1000 + number)
            make = strided if number % 2 else random_dtensor
            found[f"{1000 + number} at random"] = make(chance, full, square)
        tp = square["tp"]  # (0, 1) on the first two ranks, (2, 3) on the others
        full = noise(list(SHAPES[0]), torch.float32, 0)
        found["0 on each half of the ranks"] = split(full, tp, [Shard(1)])
        full = noise([9, 4], torch.float32, rank // 2)
        found[f"{rank // 2} on half of the ranks, {rank // 2}"] = split(full, tp, [Shard(0)])
    return {key: alone(tensor) for key, tensor in found.items()}


def alone(tensor: DTensor) -> DTensor:
    """Return one whose shard has memory of its own: torch saves none with an offset."""
    return DTensor.from_local(
        tensor.to_local().clone(),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def trained(count: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (count,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    return model, optimizer


def main() -> None:
    rank, count = join()
    folder, who = Path(sys.argv[1]), sys.argv[2]
    warnings.simplefilter("ignore")
    model, optimizer = trained(count)
    weight = noise([40, 30], torch.bfloat16, 3)
    items: dict[str, Any] = {
        "placed": placed(rank, count),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "plain": {"weight": weight, "tied": weight, "steps": [3, {"lr": float("nan")}, (1, None)]},
        "own": {"data": noise([16], torch.uint8, rank), "rank": rank},
    }
    if who == "manager":
        from torch_checkpointing import CheckpointManager

        from fastserial.integrations.torch_checkpointing import FastStorageConfig

        config = CheckpointManager.Config.with_sync_save()
        config.storage_config = FastStorageConfig()
        manager = config.build()
        manager.save(str(folder), items)
        manager.close()
    else:
        folder.mkdir(exist_ok=True)
        for item, value in items.items():
            with (folder / f"{item}_{rank}.pt").open("wb") as file:
                torch.save(value, file)
    dist.barrier()


if __name__ == "__main__":
    main()
