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


def cut(dim: int, *cuts: tuple[int, int, int]) -> EnumerableShardingSpec:
    """Return a sharding of (10, 20) by rows or columns: first, number, rank."""
    shards = []
    for first, number, rank in cuts:
        offsets, sizes = [0, 0], [10, 20]
        offsets[dim], sizes[dim] = first, number
        shards.append(ShardMetadata(offsets, sizes, f"rank:{rank}"))
    return EnumerableShardingSpec(shards=shards)


SPECS: list[Any] = [
    ChunkShardingSpec(dim=0, placements=["rank:0", "rank:1", "rank:1", "rank:0"]),
    cut(0, (0, 2, 0), (2, 1, 1), (3, 3, 0), (6, 3, 1), (9, 1, 0)),
    cut(1, (0, 5, 1), (5, 14, 0), (19, 1, 1)),
]


def whole(tensor: Any) -> torch.Tensor:
    found = torch.zeros(10, 20)
    tensor.gather(out=found if dist.get_rank() == 0 else None)
    return found


def main() -> None:
    rank, _ = join()
    folder = Path(sys.argv[1])
    count = 0
    plain = torch.arange(200.0).view(10, 20)
    for number, before in enumerate(SPECS):
        saved = sharded_tensor.rand(before, 10, 20)
        path = folder / str(number)
        planner = FastSavePlanner() if number % 2 else None
        state = {"x": saved, "plain": plain}
        dcp.save(state, storage_writer=FastStorageWriter(path), planner=planner)
        for after in SPECS:
            reader: Any = FastStorageReader(path) if count % 3 else dcp.FileSystemReader(path)
            found = {"x": sharded_tensor.zeros(after, 10, 20)}
            dcp.load(found, storage_reader=reader, planner=FastLoadPlanner())
            swapped = {"x": torch.zeros(10, 20), "plain": sharded_tensor.zeros(after, 10, 20)}
            dcp.load(swapped, storage_reader=reader)
            a, b, c = whole(saved), whole(found["x"]), whole(swapped["plain"])
            if rank == 0:
                assert torch.equal(a, b), (before, after)
                assert torch.equal(swapped["x"], a), (before, after)
                assert torch.equal(c, plain), (before, after)
            count += 1
    print(count)


main()
