"""FSDP2 over NCCL, on as many ranks as there are GPUs: saved, resumed. Argument: a folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.gpu import DEVICE, steps
from support.ranks import join
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fastserial
from fastserial import distributed

FOLDER = Path(sys.argv[1])


class Run:
    """A model, its optimizer, and a step after the other."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        count = dist.get_world_size()
        self.model = nn.Sequential(nn.Linear(96, 512), nn.Dropout(0.2), nn.Linear(512, 33))
        self.model.to(DEVICE)
        fully_shard(self.model, mesh=init_device_mesh(DEVICE, (count,)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def steps(self, count: int) -> list[float]:
        return steps(self.model, self.optimizer, count, 96)


def main() -> None:
    device = torch.device(DEVICE, int(os.environ["RANK"]))
    torch.cuda.set_device(device)
    join("nccl", device_id=device)

    first = Run(1)
    first.steps(3)
    with fastserial.Checkpointer(FOLDER / "run", first.state) as checkpointer:
        checkpointer.save(3)
        expected = first.steps(3)  # beside the save
    second = Run(2)
    with fastserial.Checkpointer(FOLDER / "run", second.state) as checkpointer:
        assert checkpointer.resume() == 3
    assert second.steps(3) == expected

    path = FOLDER / "model.pt"
    distributed.save({"model": second.model}, path)
    found = torch.load(path)["model"]
    for name, parameter in second.model.named_parameters():
        assert torch.equal(found[name], parameter.full_tensor().detach().cpu()), name  # type: ignore[attr-defined]
    third = Run(3)
    distributed.load(path, {"model": third.model})
    for ours, wanted in zip(third.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours.to_local(), wanted.to_local())  # type: ignore[attr-defined]
    dist.barrier()
    dist.destroy_process_group()


main()
