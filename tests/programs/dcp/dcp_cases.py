"""A rank: random states through torch.distributed.checkpoint, ours and stock mixed.

Arguments: folder, seed, cases. Each state is saved by one storage and planner, and loaded, in other
placements, by another; both are ours or stock's by chance.
"""

from __future__ import annotations

import math
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import join
from support.sharded import meshes, noise, random_dtensor, random_tensor, same_bytes
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from fastserial.distributed import (
    FastLoadPlanner,
    FastSavePlanner,
    FastStorageReader,
    FastStorageWriter,
)
from fastserial.distributed.sharding.pieces import holding

# Its planners refuse some strided shards, and get others wrong; later ones do if they are uneven.
STOCK_IS_WRONG = torch.__version__.startswith("2.6.")


def random_state(chance: random.Random, grids: list[Any], case: int) -> tuple[Any, Any]:
    """Return a state, and the whole of it (the same on every rank)."""
    state: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    for index in range(chance.randrange(1, 8)):
        key = f"layer.{index}"
        full = random_tensor(chance, *((150, 3) if chance.random() < 0.15 else (9, 4)))
        kind = chance.random()
        if kind < 0.7:
            state[key], whole[key] = random_dtensor(chance, full, chance.choice(grids)), full
        elif kind < 0.9:
            state[key], whole[key] = full.clone(), full
        else:
            state[key] = whole[key] = chance.choice([3, "text", None, [1, 2.5], {"a": b"x"}])
    if chance.random() < 0.3:
        full = noise([chance.choice([3, 700]), 5000], torch.float32, case)
        state["large"], whole["large"] = full.clone(), full
        state["turned"], whole["turned"] = full.t(), full.t()
    return state, whole


def is_for_ours_only(state: dict[str, Any]) -> bool:
    """Return whether stock's planners may get a state wrong: it could not read its own files."""
    for value in state.values():
        if not isinstance(value, DTensor):
            continue
        for place in value.placements:
            if isinstance(place, _StridedShard):
                splits = zip(value.placements, value.device_mesh.shape, strict=True)
                ranks = math.prod(
                    n for other, n in splits if getattr(other, "dim", -1) == place.dim
                )
                if value.shape[place.dim] % ranks:
                    return True
    return STOCK_IS_WRONG


def blank(value: Any, chance: random.Random, grids: list[Any]) -> Any:
    if isinstance(value, dict):
        return dict.fromkeys(value)
    if not isinstance(value, torch.Tensor):
        return [None] * len(value) if isinstance(value, list) else None
    if chance.random() < 0.3:
        return torch.zeros_like(value)
    zeros = torch.zeros(value.shape, dtype=value.dtype)
    return random_dtensor(chance, zeros, chance.choice(grids))


def compare(found: Any, whole: Any, key: str, rank: int, count: int) -> None:
    if not isinstance(whole, torch.Tensor):
        assert found == whole, (key, found, whole)
    elif isinstance(found, DTensor):
        for box, view in holding(found, key, rank, {i: i for i in range(count)}).parts:
            ends = zip(*box, strict=True)
            part = whole[tuple(slice(first, first + size) for first, size in ends)]
            assert same_bytes(part.contiguous(), view.contiguous()), (key, found.placements)
    else:
        assert same_bytes(found, whole), key


def main() -> None:
    rank, count = join()
    folder, seed, cases = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    grids = meshes(count)
    for case in range(cases):
        state, whole = random_state(chance, grids, case)
        path = folder / str(case % 3)
        ours = chance.random() < 0.75
        writer: Any = dcp.FileSystemWriter(path)
        if ours:
            writer = FastStorageWriter(path)
        ours_plans = chance.random() < 0.6 or is_for_ours_only(state)
        save_planner = FastSavePlanner() if ours_plans else None
        ours_plans = chance.random() < 0.7
        ours_reads = chance.random() < 0.7
        reader: Any = dcp.FileSystemReader(path)
        if ours_reads:
            reader = FastStorageReader(path, verify=chance.random() < 0.8)
        saved: Any = dcp.save(state, storage_writer=writer, planner=save_planner)
        found = {key: blank(value, chance, grids) for key, value in whole.items()}
        load_planner = FastLoadPlanner() if ours_plans or is_for_ours_only(found) else None
        dcp.load(found, storage_reader=reader, planner=load_planner)
        for key, value in whole.items():
            compare(found[key], value, f"case {case}: {key}", rank, count)
        dist.barrier()
        if ours:
            told = FastStorageReader(path).read_metadata()
            assert saved.storage_data == told.storage_data, case
            assert saved.state_dict_metadata == told.state_dict_metadata, case
            assert saved.planner_data == told.planner_data, case
        if rank == 0 and ours:
            places = told.storage_data.values()
            needed = {place.relative_path for place in places} | {".metadata"}
            assert set(os.listdir(path)) == needed, (case, os.listdir(path), needed)
        dist.barrier()
    print(cases)


main()
