"""A rank whose checkpoints are mirrored: `ranks_mirror.py FOLDER URL`.

Prints what it resumed from: when the folder was lost, and when its newest file was damaged and had
no copy.
"""

from __future__ import annotations

import shutil
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from support.damage import flip
from support.ranks import join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fastserial import Checkpointer


def main() -> None:
    folder, url = Path(sys.argv[1]), sys.argv[2]
    rank, _ = join()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"weight": distribute_tensor(torch.zeros(100, 100), mesh, [Shard(0)])}
    mine = state["weight"].to_local()
    with Checkpointer(folder, state, keep=2, mirror=url) as checkpointer:
        for step in range(1, 5):
            mine.fill_(step)
            checkpointer.save(step)
    for damaged in (False, True):
        dist.barrier()
        if not rank and not damaged:
            shutil.rmtree(folder)
        elif not rank:
            newest = folder / "step-00000004.pt"
            flip(newest, newest.stat().st_size // 2)
            Path(url.removeprefix("file://"), f"{newest.name}.json").unlink()
        dist.barrier()
        mine.fill_(0)
        with warnings.catch_warnings(), Checkpointer(folder, state, mirror=url) as checkpointer:
            warnings.simplefilter("ignore")
            print(checkpointer.resume(), mine.unique().tolist(), flush=True)
    dist.destroy_process_group()


main()
