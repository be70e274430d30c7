"""A rank whose tensors are on the GPU that all ranks of the machine share. Argument: a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.gpu import DEVICE
from support.ranks import alone, join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import fastserial
from fastserial.distributed import (
    FastLoadPlanner,
    FastSavePlanner,
    FastStorageReader,
    FastStorageWriter,
    FlatShard,
    load,
    save,
    save_async,
)

FOLDER = Path(sys.argv[1])
RANK, COUNT = join()
MESH = DeviceMesh(DEVICE, torch.arange(COUNT))
SHAPE = (COUNT * 600, 700)


def whole(start: float) -> dict[str, Any]:
    """What one process would hold on the host."""
    rows = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE) + start
    return {"rows": rows, "columns": rows * 2, "same": rows * 3, "flat": rows * 4, "step": start}


def shares(start: float) -> dict[str, Any]:
    """The same, divided among the ranks and on the GPU."""
    found = whole(start)

    def shard(name: str, dim: int) -> DTensor:
        part = found[name].chunk(COUNT, dim)[RANK].contiguous().to(DEVICE)
        return DTensor.from_local(part, MESH, [Shard(dim)], run_check=False)

    flat = found["flat"].flatten().chunk(COUNT)[RANK].to(DEVICE)
    return {
        "rows": shard("rows", 0),
        "columns": shard("columns", 1),
        "same": found["same"].to(DEVICE),
        "flat": FlatShard(SHAPE, torch.float32, RANK * flat.numel(), flat.numel(), flat),
        "step": start,
    }


def local(value: Any) -> Any:
    value = value.to_local() if isinstance(value, DTensor) else value
    return value.tensor if isinstance(value, FlatShard) else value


def check(state: dict[str, Any], start: float) -> None:
    """Make sure that a state is what it was at `start`, on the GPU."""
    torch.cuda.synchronize()
    for name, wanted in shares(start).items():
        found = local(state[name])
        if isinstance(found, torch.Tensor):
            assert found.device.type == DEVICE, name
            assert torch.equal(found, local(wanted)), name
        else:
            assert found == wanted, name


def main() -> None:
    path = FOLDER / "whole.pt"  # its name is in the file, too
    alone(lambda: torch.save(whole(1.0), path))
    stocks = path.read_bytes()
    save(shares(1.0), path)
    assert path.read_bytes() == stocks
    state = shares(0.0)
    load(path, state)
    check(state, 1.0)

    pending = save_async(state, path)
    with torch.no_grad():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                local(value).zero_()
    pending.wait()
    assert path.read_bytes() == stocks

    folder = FOLDER / "dcp"
    state = shares(1.0)
    del state["flat"]  # DCP does not know it
    writer = FastStorageWriter(folder)
    dcp.save(state, storage_writer=writer, planner=FastSavePlanner())
    again = shares(0.0)
    del again["flat"]
    dcp.load(again, storage_reader=FastStorageReader(folder), planner=FastLoadPlanner())
    check({**again, "flat": shares(1.0)["flat"]}, 1.0)

    with fastserial.Checkpointer(FOLDER / "run", {"state": shares(1.0)}) as checkpointer:
        checkpointer.save(7)
    resumed = {"state": shares(0.0)}
    with fastserial.Checkpointer(FOLDER / "run", resumed) as checkpointer:
        assert checkpointer.resume() == 7
    check(resumed["state"], 1.0)
    dist.barrier()
    dist.destroy_process_group()


main()
