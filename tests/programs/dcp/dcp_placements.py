"""A rank of four: every placement into every other. Arguments: folder, who saves, who loads, `all`.

13 placements x 13 x 7 shapes: 1,183 tensors, each loaded into zeros. And the same for jobs that are
smaller when they load, or when they save. Instead of `all`, `some`: only into the last two of the
placements. Who saves and loads: `dcp`, all of ours; `planners`, with the storage of stock;
`storage`, with its planners; `stock`. Prints how many of the 1,183 were compared; then how many in
all, and how many of these differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import join
from support.sharded import noise, same_bytes, split, split_last
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fastserial.distributed import (
    FastLoadPlanner,
    FastSavePlanner,
    FastStorageReader,
    FastStorageWriter,
)

Make = Callable[[torch.Tensor], DTensor]
SHAPES = [(8, 12), (7, 5), (3, 2), (1, 9), (0, 4), (130, 33), (701, 601)]  # the last one is cut
WHOLE = {str(shape): noise(list(shape), torch.float32, seed) for seed, shape in enumerate(SHAPES)}
ONE = [Replicate(), Shard(0), Shard(1)]


def placed(mesh: DeviceMesh, *placements: Any) -> Make:
    return lambda full: split(full, mesh, list(placements))


def makers() -> list[Make]:
    """Return what makes a DTensor of a tensor, on all four ranks."""
    line, square = (DeviceMesh("cpu", torch.arange(4).view(grid)) for grid in ((4,), (2, 2)))
    return [
        *(placed(line, one) for one in ONE),
        *(placed(square, one, other) for one in ONE for other in ONE),
        lambda full: split_last(full, square, [0, 0]),
    ]


def save(state: dict[str, Any], path: Path, who: str, group: Any) -> None:
    writer: Any = dcp.FileSystemWriter(path)
    if who not in ("planners", "stock"):
        writer = FastStorageWriter(path)
    planner = None if who in ("storage", "stock") else FastSavePlanner()
    dcp.save(state, storage_writer=writer, planner=planner, process_group=group)


def load(state: dict[str, Any], path: Path, who: str, group: Any) -> None:
    reader: Any = dcp.FileSystemReader(path)
    if who not in ("planners", "stock"):
        reader = FastStorageReader(path)
    planner = None
    if who not in ("storage", "stock"):
        planner = FastLoadPlanner()
    dcp.load(state, storage_reader=reader, planner=planner, process_group=group)


def loaded(
    before: list[Make], after: list[Make], path: Path, who: str, group: Any
) -> tuple[int, list[str]]:
    """Load what all of `before` made into what each of `after` makes.

    Returns:
        How many tensors were compared; those that differ.
    """
    count, differing = 0, []
    for number, make in enumerate(after):
        keys = {f"{old} {name}": name for old in range(len(before)) for name in WHOLE}
        state = {key: make(torch.zeros_like(WHOLE[name])) for key, name in keys.items()}
        load(state, path, who, group)
        for key, name in keys.items():
            wanted = make(WHOLE[name])
            count += 1
            if not same_bytes(state[key].to_local(), wanted.to_local()):
                differing.append(f"{key} -> {number}")
    return count, differing


def main() -> None:
    rank, ranks = join()
    path, writes, reads = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    groups = {count: dist.new_group(list(range(count))) for count in (1, 2, 3)}
    groups[ranks] = None
    every = {count: [placed(_line(count), one) for one in ONE] for count in (1, 2, 3)}
    every[ranks] = makers()
    total = wrong = 0
    sizes = [(4, 4), (4, 1), (4, 2), (4, 3), (1, 4), (3, 4), (2, 3)]
    for writers, readers in sizes if sys.argv[4] == "all" else sizes[:1]:
        before, after = every[writers], every[readers]
        if sys.argv[4] != "all":
            after = after[-2:]
        if rank < writers:
            state = {
                f"{old} {name}": make(full)
                for old, make in enumerate(before)
                for name, full in WHOLE.items()
            }
            save(state, path, writes, groups[writers])
        dist.barrier()
        if rank < readers:
            count, differing = loaded(before, after, path, reads, groups[readers])
            if writers == readers == ranks:
                print(count)
            total += count
            wrong += len(differing)
            for line in differing:
                print(f"{writers} ranks, {readers} ranks: {line}", file=sys.stderr)
        dist.barrier()
    print(total, wrong)


def _line(count: int) -> DeviceMesh:
    """Return a mesh of the first ranks; the others are not in it."""
    return DeviceMesh("cpu", torch.arange(count))


main()
