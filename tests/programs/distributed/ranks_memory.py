"""A rank: how many bytes saves and loads take beside the state. Arguments: folder, MiB, one or dcp.

Saves MiB of float32, and loads them as they were, in other placements, and as another type. Prints
the most bytes that the process had during each, less those that it had before.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from support.limits import peak
from support.ranks import join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, full

from fastserial import distributed
from fastserial.distributed import (
    FastLoadPlanner,
    FastSavePlanner,
    FastStorageReader,
    FastStorageWriter,
)

PLACEMENTS: list[Any] = [Shard(0), Shard(1), Replicate()]


def main() -> None:
    _, count = join()
    path, mib, how = Path(sys.argv[1]) / "file", int(sys.argv[2]), sys.argv[3]
    mesh = DeviceMesh("cpu", torch.arange(count))

    def state_of(mib: int, value: int, turn: int = 0, dtype: Any = torch.float32) -> dict[str, Any]:
        shape = (mib * 2**20 // 4 // 4 // 1024, 1024)
        state: dict[str, Any] = {"plain": torch.full(shape, value, dtype=dtype)}
        for number in range(3):
            placements = [PLACEMENTS[(number + turn) % 3]]
            where: Any = {"device_mesh": mesh, "placements": placements}
            state[str(number)] = full(shape, value, dtype=dtype, **where)
        return state

    def save(state: dict[str, Any]) -> None:
        if how == "one":
            distributed.save(state, path, timeout=60)
        else:
            dcp.save(state, storage_writer=FastStorageWriter(path), planner=FastSavePlanner())

    def load(state: dict[str, Any]) -> None:
        if how == "one":
            distributed.load(path, state, cast=True)
        else:
            dcp.load(state, storage_reader=FastStorageReader(path), planner=FastLoadPlanner())

    save(state_of(2, 1))
    load(state_of(2, 1))
    state = state_of(mib, 2)
    peaks = [peak(lambda: save(state))]
    for turn, dtype in ((0, torch.float32), (1, torch.float32), (2, torch.bfloat16)):
        state = state_of(mib, 0, turn, dtype)
        peaks.append(peak(partial(load, state)))
        for value in state.values():
            assert bool(torch.all(getattr(value, "_local_tensor", value) == 2))
    print(*peaks)


main()
