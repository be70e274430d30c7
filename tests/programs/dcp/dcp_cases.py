"""A rank: random states through torch.distributed.checkpoint, ours and stock mixed.

Arguments: folder, seed, cases. Each state is saved by one storage and planner, and loaded, in other
placements, by another; both are ours or stock's by chance. Every other state is the one before it,
of which one thing has changed: the plan of that one must not be used for it.
"""

from __future__ import annotations

import math
import os
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.nests import blank, differing, like
from support.ranks import join
from support.sharded import Holder, hold, meshes, noise, random_tensor, vary
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from fastserial.distributed import (
    FastLoadPlanner,
    FastSavePlanner,
    FastStorageReader,
    FastStorageWriter,
)

# Its planners refuse some strided shards, and get others wrong; later ones do if they are uneven.
STOCK_IS_WRONG = torch.__version__.startswith("2.6.")


def held(chance: random.Random, grids: list[Any], full: torch.Tensor) -> Any:
    return full.clone() if chance.random() < 0.2 else hold(chance, full, grids, flat=0)


def random_state(chance: random.Random, grids: list[Any], case: int) -> tuple[Any, Any]:
    """Return a state, and the whole of it (the same on every rank)."""
    state: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    for index in range(chance.randrange(1, 8)):
        key = f"layer.{index}"
        full = random_tensor(chance, *((150, 3) if chance.random() < 0.15 else (9, 4)))
        if chance.random() < 0.9:
            state[key], whole[key] = held(chance, grids, full), full
        else:
            state[key] = whole[key] = chance.choice([3, "text", None, [1, 2.5], {"a": b"x"}])
    if chance.random() < 0.3:
        full = noise([chance.choice([3, 700]), 5000], torch.float32, case)
        state["large"], whole["large"] = full.clone(), full
        state["turned"], whole["turned"] = full.clone().t(), full.clone().t()
    return state, whole


def wrapped(state: dict[str, Any], nested: bool) -> dict[str, Any]:
    """Return nests that differ where planners flatten them to the same."""
    return {"m": dict(state)} if nested else {f"m.{key}": value for key, value in state.items()}


def is_for_ours_only(state: dict[str, Any]) -> bool:
    """Return whether stock's planners may get a state wrong: it could not read its own files."""
    for value in state.values():
        if not isinstance(value, DTensor):
            continue
        if value._local_tensor.dtype is not value.dtype:
            return True
        for place in value.placements:
            if isinstance(place, _StridedShard):
                splits = zip(value.placements, value.device_mesh.shape, strict=True)
                ranks = math.prod(
                    n for other, n in splits if getattr(other, "dim", -1) == place.dim
                )
                if value.shape[place.dim] % ranks:
                    return True
    return STOCK_IS_WRONG


def main() -> None:
    rank, count = join()
    folder, seed, cases = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    grids = meshes(count)
    state: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    for case in range(cases):
        if case % 2:
            vary(chance, state, whole, partial(held, chance, grids))
        else:
            state, whole = random_state(chance, grids, case)
        path = folder / str(case % 3)
        ours = chance.random() < 0.75
        writer: Any = FastStorageWriter(path) if ours else dcp.FileSystemWriter(path)
        ours_plans = chance.random() < 0.6 or is_for_ours_only(state)
        save_planner = FastSavePlanner() if ours_plans else None
        ours_plans = chance.random() < 0.7
        reader: Any = dcp.FileSystemReader(path)
        if chance.random() < 0.7:
            reader = FastStorageReader(path, verify=chance.random() < 0.8)
        nested = chance.random() < 0.5
        saved: Any = dcp.save(wrapped(state, nested), storage_writer=writer, planner=save_planner)
        choices = chance.randrange(2**31)
        found = blank(whole, Holder(choices, grids, flat=0, zeros=True))
        want = like(whole, Holder(choices, grids, flat=0))
        load_planner = None
        if ours_plans or is_for_ours_only(found):
            load_planner = FastLoadPlanner()
        into = wrapped(found, nested)
        dcp.load(into, storage_reader=reader, planner=load_planner)
        assert not differing(into, wrapped(want, nested)), f"case {case}"
        dist.barrier()
        if ours:
            told = FastStorageReader(path).read_metadata()
            for part in ("storage_data", "state_dict_metadata", "planner_data"):
                assert getattr(saved, part) == getattr(told, part), (case, part)
            if rank == 0:
                needed = {place.relative_path for place in told.storage_data.values()}
                assert set(os.listdir(path)) == needed | {".metadata"}, (case, os.listdir(path))
        dist.barrier()
    print(cases)


main()
