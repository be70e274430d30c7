"""A rank: saves random states, and compares with stock. Arguments: folder, seed, cases."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.corpus import TORCH, aligned
from support.ranks import join
from support.sharded import meshes, noise, random_dtensor, random_tensor

from fastserial import distributed
from fastserial.distributed import FlatShard
from fastserial.distributed.state.tables import SHARED_FROM

# Of storages in the file: many ranks need a multiple of 16.
ALIGNMENTS = (64, 64, 64, 16, 4096) if TORCH >= (2, 7) else (64,)


def random_state(chance: random.Random, grids: list[Any], rank: int, count: int) -> tuple[Any, Any]:
    """Return a state, and the whole of it (the same on every rank)."""
    state: dict[str, Any] = {}
    whole: dict[str, Any] = {}

    def put(key: Any, value: Any, full: Any) -> None:
        state[key], whole[key] = value, full

    for index in range(chance.randrange(1, 8)):
        kind = chance.random()
        large = chance.random() < 0.12
        full = random_tensor(chance, *((150, 3) if large else (9, 4)))
        key = f"layer.{index}"
        if kind < 0.55:
            put(key, random_dtensor(chance, full, chance.choice(grids)), full)
        elif kind < 0.7:
            cuts = sorted(chance.randint(0, full.numel()) for _ in range(count - 1))
            ends = [0, *cuts, full.numel()]
            first, stop = ends[rank], ends[rank + 1]
            flat = full.flatten()[first:stop].clone()
            put(key, FlatShard(tuple(full.shape), full.dtype, first, stop - first, flat), full)
        elif kind < 0.8:
            size = chance.choice([100, 3 * 2**20 + 5])
            put(key, *[noise([size], torch.uint8, chance.randrange(2**31))] * 2)
        elif kind < 0.9:
            # A small tensor may differ: the file is what rank 0 would have written.
            mine = torch.zeros_like(full) if rank and full.nbytes < SHARED_FROM else full
            put(key, mine, full)
            half = full.numel() // 2
            put(f"{key}.view", mine.flatten()[:half], full.flatten()[:half])
        else:
            put(key, *[chance.choice([3, "text", None, [1, 2.5], b"x" * 100])] * 2)
    keys = list(state)
    if chance.random() < 0.3:  # the same leaf twice
        key = chance.choice(keys)
        put("tied", state[key], whole[key])
    if chance.random() < 0.3:
        return {"a": OrderedDict(state), "b": [1]}, {"a": OrderedDict(whole), "b": [1]}
    if chance.random() < 0.2:
        return [*state.values()], [*whole.values()]
    return state, whole


def main() -> None:
    rank, count = join()
    folder, seed, cases = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    grids = meshes(count)
    for case in range(cases):
        state, whole = random_state(chance, grids, rank, count)
        writers = chance.choice(["all", "all", "node", 2])
        path = folder / "file.pt"
        alignment = chance.choice(ALIGNMENTS)
        with aligned(alignment) if alignment != 64 else nullcontext():
            distributed.save(state, path, writers=writers, timeout=30)
        if rank == 0:
            stock = folder / "stock" / "file.pt"
            stock.parent.mkdir(exist_ok=True)
            with aligned(alignment) if alignment != 64 else nullcontext():
                torch.save(whole, stock)
            a, b = path.read_bytes(), stock.read_bytes()
            if a != b:
                at = next(
                    (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                    min(len(a), len(b)),
                )
                raise AssertionError(
                    f"case {case}: {len(a)} and {len(b)} bytes, differ at {at}: {whole}"
                )
            left = [name.name for name in folder.iterdir() if name.name not in ("file.pt", "stock")]
            assert not left, left
    dist.barrier()
    print(cases)


main()
