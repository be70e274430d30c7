"""A rank of a training run that saves by `dcp.async_save`, as torchtitan does.

Arguments: folder, steps, flags. Prints where it starts, and each step's loss, exactly. A byte of
`flags` for each rank tells that a save of it is running. Started again, it goes on from the newest
checkpoint that is complete.
"""

from __future__ import annotations

import mmap
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import join
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from fastserial.distributed import (
    FastLoadPlanner,
    FastSavePlanner,
    FastStorageReader,
    FastStorageWriter,
)

WIDTH = 520
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Model:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self.model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state)


class Optimizer:
    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state, options=FLAT)


class Progress:
    """The step, and where this rank's data stands."""

    def __init__(self, rank: int) -> None:
        self.step = 0
        self.rank = rank
        self.data = torch.Generator().manual_seed(100 + rank)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, f"data.{self.rank}": self.data.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.data.set_state(state[f"data.{self.rank}"])


def made(count: int) -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 100)
    )
    if torch.__version__.startswith("2.6."):  # FSDP2 does not run on the CPU there
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (count,))
    for layer in (model[0], model[3]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints, the newest one last."""
    found = [path.parent for path in folder.glob("step-*/.metadata")]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def main() -> None:
    rank, count = join()
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    with Path(sys.argv[3]).open("r+b") as file:
        flags = mmap.mmap(file.fileno(), count)
    group: Any = dist.new_group(backend="gloo")  # of the saves: they run beside the training
    model = made(count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    progress = Progress(rank)
    states = {
        "model": Model(model),
        "optimizer": Optimizer(model, optimizer),
        "lr_scheduler": scheduler,
        "train_state": progress,
    }
    found = complete(folder)
    dist.barrier()
    if found:
        reader = FastStorageReader(found[-1])
        dcp.load(states, storage_reader=reader, planner=FastLoadPlanner())
    print("start", progress.step, flush=True)
    pending: Any = None

    def over(_: Any) -> None:
        flags[rank] = 0

    while progress.step < steps:
        progress.step += 1
        x = torch.randn(16, WIDTH, generator=progress.data)
        loss = (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        print(progress.step, loss.item().hex(), flush=True)
        if pending is not None:
            pending.result()
            for old in complete(folder)[:-2] if rank == 0 else []:
                shutil.rmtree(old)
        writer = FastStorageWriter(folder / f"step-{progress.step}")
        flags[rank] = 1
        pending = dcp.async_save(
            states, storage_writer=writer, planner=FastSavePlanner(), process_group=group
        )
        pending = getattr(pending, "upload_completion", pending)
        pending.add_done_callback(over)
    pending.result()


main()
