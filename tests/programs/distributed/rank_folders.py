"""A rank that saves by torch_checkpointing, or puts its files together.

Arguments: folder; `save` or `put together`. Items: `model` and `optimizer` of FSDP2; `plain`, equal
on all ranks. The files beside the folder: what was put together, and what each rank gathered.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from support.ranks import join
from torch import nn
from torch.distributed.checkpoint.state_dict import _gather_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fastserial import distributed
from fastserial.integrations.torch_checkpointing import FastStorageConfig


def trained(count: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (count,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    return model, optimizer


def save(folder: Path, count: int) -> None:
    from torch_checkpointing import CheckpointManager

    model, optimizer = trained(count)
    items: dict[str, Any] = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "plain": {"weight": torch.arange(1200), "steps": [3, {"lr": 0.1}, (1, None)]},
    }
    config = CheckpointManager.Config.with_sync_save()
    config.storage_config = FastStorageConfig()
    manager = config.build()
    manager.save(str(folder), items)
    manager.close()


def put_together(folder: Path, rank: int) -> None:
    items = {
        path.name.rpartition("_")[0]: torch.load(path)
        for path in sorted(folder.glob(f"*_{rank}.pt"))
    }
    distributed.save(items, f"{folder}.together.pt", merge="union")
    whole = _gather_state_dict(items)
    if rank == 0:
        torch.save(whole, f"{folder}.whole.pt")


def main() -> None:
    rank, count = join()
    folder = Path(sys.argv[1])
    warnings.simplefilter("ignore")
    if sys.argv[2] == "save":
        save(folder, count)
    else:
        put_together(folder, rank)


if __name__ == "__main__":
    main()
