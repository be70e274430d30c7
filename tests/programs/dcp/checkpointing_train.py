"""A rank of a training run that saves by torch_checkpointing's manager.

Arguments: folder, steps, flags. Prints where it starts, and each step's loss, exactly. A byte of
`flags` for each rank tells that a save of it is running. The writing processes tell of themselves
in `told`. Started again, it goes on from the newest checkpoint that is complete.
"""

from __future__ import annotations

import mmap
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.ranks import join
from support.told import tell
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_checkpointing import CheckpointManager

from fastserial.integrations.torch_checkpointing import FastStorageConfig

WIDTH = 520


def complete(folder: Path) -> list[Path]:
    """Return the checkpoints that have got their names, the newest one last."""
    found = [path for path in folder.iterdir() if path.name.isdigit()]
    return sorted(found, key=lambda path: int(path.name))


def main() -> None:
    rank, count = join()
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    with Path(sys.argv[3]).open("r+b") as file:
        flags = mmap.mmap(file.fileno(), count)
    warnings.simplefilter("ignore")
    config = CheckpointManager.Config.with_async_save()
    config.storage_config = FastStorageConfig()
    config.subprocess_init_fn = tell
    config.subprocess_init_args = (str(folder / "told"),)
    config.save.writer_config.checkpoint_write_barrier_timeout_sec = 10
    manager = config.build()
    torch.manual_seed(1)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 100))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    data = torch.Generator().manual_seed(100 + rank)
    step = 0
    found = complete(folder)
    dist.barrier()
    if found:
        train: Any = manager.load(str(found[-1]), {"train": None})["train"]
        model.load_state_dict(train["model"])
        optimizer.load_state_dict(train["optimizer"])
        scheduler.load_state_dict(train["scheduler"])
        data.set_state(train["data"])
        step = train["step"]
    print("start", step, flush=True)
    pending: Any = None
    while step < steps:
        step += 1
        x = torch.randn(16, WIDTH, generator=data)
        loss = (model(x) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        with manager.lock():
            optimizer.step()
        scheduler.step()
        print(step, loss.item().hex(), flush=True)
        if pending is not None:
            pending.result()
            for old in complete(folder)[:-2] if rank == 0 else []:
                shutil.rmtree(old)
        train = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "data": data.get_state(),
            "step": step,
        }
        flags[rank] = 1
        pending = manager.save(str(folder / str(step)), {"train": train})
        pending.add_done_callback(lambda _: flags.__setitem__(rank, 0))
    pending.result()
    manager.close()


if __name__ == "__main__":  # a spawned process imports this
    main()
