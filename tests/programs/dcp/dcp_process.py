"""A rank: `async_save` by a process of its own. Arguments: folder, who.

`who` is `ours` or `stock`. Prints the process, and whether torch is patched in it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import join
from support.told import TellingStockWriter, TellingWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import fastserial
from fastserial.distributed import FastSavePlanner, FastStorageReader


def main() -> None:
    _, count = join()
    path, who = Path(sys.argv[1]), sys.argv[2]
    os.environ["MASTER_ADDR"] = "localhost"  # of the writing processes' own group
    mesh = DeviceMesh("cpu", torch.arange(count))
    group: Any = dist.new_group(backend="gloo")
    rows, whole = torch.zeros(1000, 300), torch.zeros(1 << 19)
    state: dict[str, Any] = {
        "rows": DTensor.from_local(rows, mesh, [Shard(0)], run_check=False),
        "all": whole,
        "little": torch.zeros(7),
    }
    tensors = [rows, whole, state["little"]]
    for step in (1, 2, 3):  # the third one by the plan that was kept
        for tensor in tensors:
            tensor.fill_(step)
        writer: Any = TellingStockWriter(path)
        planner = None
        if who != "stock":
            writer = TellingWriter(path)
            planner = FastSavePlanner()
        answer = dcp.async_save(
            state | {"step": step},
            storage_writer=writer,
            planner=planner,
            process_group=group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        getattr(answer, "upload_completion", answer).result(timeout=120)
        for tensor in tensors:
            tensor.fill_(-1)
        found = state | {"step": 0}
        reader = dcp.FileSystemReader(path) if who == "stock" else FastStorageReader(path)
        dcp.load(found, storage_reader=reader)
        assert found["step"] == step
        assert all(bool(torch.all(tensor == step)) for tensor in tensors), step
    print(os.getpid(), fastserial.installed())


if __name__ == "__main__":  # a spawned process imports this
    main()
