"""A rank of two: ShardedTensors from any sharding into any other. Argument: folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import join
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardMetadata,
)

from fastserial.distributed import (
    FastLoadPlanner,
    FastSavePlanner,
    FastStorageReader,
    FastStorageWriter,
)


def rows(*cuts: tuple[int, int, int]) -> EnumerableShardingSpec:
    return EnumerableShardingSpec(
        shards=[
            ShardMetadata(
                shard_offsets=[first, 0], shard_sizes=[count, 20], placement=f"rank:{rank}"
            )
            for first, count, rank in cuts
        ]
    )


def columns(*cuts: tuple[int, int, int]) -> EnumerableShardingSpec:
    return EnumerableShardingSpec(
        shards=[
            ShardMetadata(
                shard_offsets=[0, first], shard_sizes=[10, count], placement=f"rank:{rank}"
            )
            for first, count, rank in cuts
        ]
    )


SPECS: list[Any] = [
    ChunkShardingSpec(dim=0, placements=["rank:0", "rank:1"]),
    ChunkShardingSpec(dim=0, placements=["rank:0", "rank:1", "rank:1", "rank:0"]),
    rows((0, 2, 0), (2, 1, 1), (3, 3, 0), (6, 3, 1), (9, 1, 0)),
    rows((0, 8, 1), (8, 2, 0)),
    columns((0, 5, 1), (5, 14, 0), (19, 1, 1)),
]


def whole(tensor: Any) -> torch.Tensor | None:
    found = torch.zeros(10, 20) if dist.get_rank() == 0 else None
    tensor.gather(out=found)
    return found


def main() -> None:
    rank, _ = join()
    folder = Path(sys.argv[1])
    count = 0
    for number, before in enumerate(SPECS):
        saved = sharded_tensor.rand(before, 10, 20)
        path = folder / str(number)
        planner = FastSavePlanner() if number % 2 else None
        plain = torch.rand(10, 20)
        dist.broadcast(plain, src=0)
        state = {"x": saved, "plain": plain}
        dcp.save(state, storage_writer=FastStorageWriter(path), planner=planner)
        for after in SPECS:
            reader: Any = FastStorageReader(path) if count % 3 else dcp.FileSystemReader(path)
            found = sharded_tensor.zeros(after, 10, 20)
            dcp.load({"x": found}, storage_reader=reader, planner=FastLoadPlanner())
            a, b = whole(saved), whole(found)
            swapped = {"x": torch.zeros(10, 20), "plain": sharded_tensor.zeros(after, 10, 20)}
            dcp.load(swapped, storage_reader=reader)
            c = whole(swapped["plain"])
            if rank == 0:
                assert a is not None and b is not None and torch.equal(a, b), (before, after)
                assert torch.equal(swapped["x"], a), (before, after)
                assert c is not None and torch.equal(c, plain), (before, after)
            count += 1
    print(count)


main()
