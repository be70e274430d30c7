"""A rank whose checkpoints are mirrored: `ranks_mirror.py FOLDER URL`.

Prints what it resumed from: when the folder was lost; when its newest file was damaged and had no
copy; and when it was lost, and the download took longer than the ranks' timeout.
"""

from __future__ import annotations

import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.damage import flip
from support.ranks import join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from fastserial import Checkpointer
from fastserial.files.remote import RemoteSource

read_to = RemoteSource.read_to


def slowly(self: RemoteSource, view: memoryview, *more: Any) -> None:
    time.sleep(8 if len(view) > 10_000 else 0)  # the file, not its manifest
    read_to(self, view, *more)


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
    timeout = 60.0
    for case in ("lost", "damaged", "slow"):
        dist.barrier()
        if case == "slow":
            timeout = 4.0
            RemoteSource.read_to = slowly  # type: ignore[method-assign]
        if not rank and case != "damaged":
            shutil.rmtree(folder)
        elif not rank:
            newest = folder / "step-00000004.pt"
            flip(newest, newest.stat().st_size // 2)
            Path(url.removeprefix("file://"), f"{newest.name}.json").unlink()
        dist.barrier()
        mine.fill_(0)
        made = Checkpointer(folder, state, mirror=url, timeout=timeout)
        with warnings.catch_warnings(), made as checkpointer:
            warnings.simplefilter("ignore")
            print(checkpointer.resume(), mine.unique().tolist(), flush=True)
    dist.destroy_process_group()


main()
