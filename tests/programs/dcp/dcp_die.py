"""A rank: saves again and again until another one is killed. Arguments: folder, who.

`who` is `ours`, `stock`, or `unguarded`: ours, with names that are not new. In the file
`flags` of the folder it says, a byte for each rank, that it is in a save.
"""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from support.ranks import join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fastserial.distributed import FastSavePlanner, FastStorageWriter
from fastserial.distributed.dcp.folder import ShardFolder


def main() -> None:
    rank, count = join()
    folder, who = Path(sys.argv[1]), sys.argv[2]
    with (folder / "flags").open("r+b") as file:
        flags = mmap.mmap(file.fileno(), count)
    if who == "unguarded":
        ShardFolder.new_shard = lambda _, prefix: f"{prefix}0.distcp"  # type: ignore[method-assign]
    mesh = DeviceMesh("cpu", torch.arange(count))
    rows, whole = torch.zeros(1 << 18, 4), torch.zeros(1 << 20)
    state: dict[str, Any] = {
        "rows": DTensor.from_local(rows, mesh, [Shard(0)], run_check=False),
        "all": whole,
        "step": 0,
    }
    while True:
        state["step"] += 1
        rows += 1
        whole += 1
        writer: Any = dcp.FileSystemWriter(folder / "out")
        if who != "stock":
            writer = FastStorageWriter(folder / "out")
        flags[rank] = 1
        try:
            planner = FastSavePlanner() if who != "stock" else None
            dcp.save(state, storage_writer=writer, planner=planner)
        except Exception as error:  # gloo's, of a connection that broke, or DCP's of that
            print(type(error).__name__)
            return
        flags[rank] = 0


main()
