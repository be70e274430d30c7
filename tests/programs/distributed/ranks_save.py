"""A rank: saves random states, and compares with stock. Arguments: folder, seed, cases.

Every other state is the one before it, of which one thing has changed: what was kept of that save
must not be used for it. Files may be the base of the next one: what is cloned is copied here.
"""

from __future__ import annotations

import os
import random
import sys
from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from support.corpus import TORCH, aligned
from support.ranks import join
from support.sharded import hold, meshes, noise, random_tensor, vary

from fastserial import distributed
from fastserial.distributed.state.tables import SHARED_FROM
from fastserial.saving import incremental

# Of storages in the file: many ranks need a multiple of 16.
ALIGNMENTS = (64, 64, 64, 16, 4096) if TORCH >= (2, 7) else (64,)
WRAPS: list[Any] = [
    *[lambda state: state] * 3,
    lambda state: {"a": OrderedDict(state), "b": [1]},
    lambda state: [*state.values()],
]


def random_state(chance: random.Random, held: Any, rank: int) -> tuple[Any, Any]:
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
        if kind < 0.7:
            put(key, held(full), full)
        elif kind < 0.8:
            size = chance.choice([100, 3 * 2**20 + 5])
            full = noise([size], torch.uint8, chance.randrange(2**31))
            # ranks but the first do not look into an object, and write parts of its tensor
            put(key, *[chance.choice([full, SimpleNamespace(x=full)])] * 2)
        elif kind < 0.9:
            # A small tensor may differ: the file is what rank 0 would have written.
            mine = torch.zeros_like(full) if rank and full.nbytes < SHARED_FROM else full
            put(key, mine, full)
            half = full.numel() // 2
            put(f"{key}.view", mine.flatten()[:half], full.flatten()[:half])
        else:
            values = [3, "text", None, [1, 2.5, -0.0], b"x" * 100, "x" * 300_000, 2**80]
            put(key, *[chance.choice(values)] * 2)
    if chance.random() < 0.3:  # the same leaf twice
        key = chance.choice(list(state))
        put("tied", state[key], whole[key])
    return state, whole


def clone(fd: int, base: int, offset: int, nbytes: int) -> None:
    """Do what a file system with reflinks does."""
    assert offset % 4096 == nbytes % 4096 == 0
    assert os.pwrite(fd, os.pread(base, nbytes, offset), offset) == nbytes


def main() -> None:
    rank, count = join()
    incremental.clone_range = clone
    cloned = 0
    before: Path | None = None
    folder, seed, cases = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    grids = meshes(count)

    def held(full: torch.Tensor) -> Any:
        return hold(chance, full, grids, flat=0.2)

    state: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    (folder / "stock").mkdir(exist_ok=True)
    for case in range(cases):
        if case % 2:
            vary(chance, state, whole, held)
        else:
            state, whole = random_state(chance, held, rank)
            wrap = chance.choice(WRAPS)
        state["step"] = whole["step"] = case * 100
        base = chance.choice([None, before])
        name = base.name if base else chance.choice(["file.pt", "longer name.pt"])
        path, stock = folder / name, folder / "stock" / name
        alignment = chance.choice(ALIGNMENTS)
        with (
            aligned(alignment) if alignment != 64 else nullcontext(),
            chance.choice([nullcontext, nullcontext, torch.inference_mode])(),
        ):
            writers = chance.choice(["all", "all", "node", 2, 1])
            report = distributed.save(wrap(state), path, writers=writers, timeout=30, base=base)
            cloned, before = cloned + report.cloned, path
            if rank == 0:
                torch.save(wrap(whole), stock)
        if rank == 0:
            a, b = path.read_bytes(), stock.read_bytes()
            pairs = zip(a, b, strict=False)
            at = next((i for i, (x, y) in enumerate(pairs) if x != y), -1) if a != b else None
            assert at is None, f"case {case}: {len(a)} and {len(b)} bytes, from {at}: {whole}"
            left = {found.name for found in folder.iterdir()} - {"file.pt", "longer name.pt"}
            assert left == {"stock"}, left
    dist.barrier()
    assert cloned or rank or cases < 200, "no case clones"
    print(cases)


main()
