"""A rank of four: what several ranks want is read once. Argument: folder.

Each rank prints how many bytes it read; then how a damaged file is told.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import join
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fastserial
from fastserial.distributed import (
    FastLoadPlanner,
    FastSavePlanner,
    FastStorageReader,
    FastStorageWriter,
)

READ = [0]


def state_of(count: int, value: int) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", torch.arange(count).view(2, -1))
    rows = torch.arange(1 << 21).view(2048, 1024) + value
    return {
        "plain": (torch.arange(3 << 20) + value).view(3072, 1024),
        "turned": (torch.arange(1 << 19) + value).view(512, 1024).t(),
        "all": distribute_tensor(rows, mesh, [Replicate(), Replicate()]),
        "pairs": distribute_tensor(rows, mesh, [Replicate(), Shard(0)]),
        "columns": distribute_tensor(rows, mesh, [Shard(1), Replicate()]),
        "own": distribute_tensor(rows, mesh, [Shard(0), Shard(0)]),
        "little": torch.arange(100) + value,
        "step": value,
    }


def count_bytes(report: Any) -> None:
    READ[0] += report.bytes


def main() -> None:
    _, count = join()
    path = Path(sys.argv[1])
    expected, found = state_of(count, 7), state_of(count, 0)
    dcp.save(expected, storage_writer=FastStorageWriter(path), planner=FastSavePlanner())
    with fastserial.options(on_load=count_bytes):
        dcp.load(
            found, storage_reader=FastStorageReader(path), planner=FastLoadPlanner(broadcast=True)
        )
    for key, value in expected.items():
        if isinstance(value, int):
            assert found[key] == value
            continue
        a, b = (x.to_local() if hasattr(x, "to_local") else x for x in (value, found[key]))
        assert torch.equal(a, b), key
    print(READ[0])
    dist.barrier()
    if dist.get_rank() == 0:
        with (path / "__2_0.distcp").open("r+b") as file:
            file.seek(1 << 20)
            file.write(b"damaged!")
    dist.barrier()
    try:
        dcp.load(
            found, storage_reader=FastStorageReader(path), planner=FastLoadPlanner(broadcast=True)
        )
    except CheckpointException as error:
        assert "__2_0.distcp: record " in str(error), error
        print("damaged")
    dcp.save(expected, storage_writer=FastStorageWriter(path), planner=FastSavePlanner())
    dcp.load(found, storage_reader=FastStorageReader(path), planner=FastLoadPlanner(broadcast=True))


main()
