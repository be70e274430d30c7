"""A rank: prints how much more memory a save and a load took at their peak (bytes).

Arguments: folder, MiB of each rank.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from support.peaks import peak
from support.ranks import join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fastserial.distributed import (
    FastLoadPlanner,
    FastSavePlanner,
    FastStorageReader,
    FastStorageWriter,
)


def state_of(mesh: DeviceMesh, mib: int, value: float, turned: bool) -> dict[str, Any]:
    """Return shards of `mib` MiB in all, and a whole tensor of a quarter more.

    Args:
        turned: the other way round, so that a rank reads parts of what all have written.
    """
    count = mesh.size()
    rows = mib * 2**20 // 4 // 1024 // 2
    tall, wide = (
        torch.full(shape, value) for shape in ((rows, 1024), (rows * count, 1024 // count))
    )
    one, other = (Shard(1), Shard(0)) if turned else (Shard(0), Shard(1))
    if turned:
        tall, wide = wide, tall
    return {
        "rows": DTensor.from_local(tall, mesh, [one], run_check=False),
        "columns": DTensor.from_local(wide, mesh, [other], run_check=False),
        "all": torch.full((rows // 2, 1024), value),
        "step": value,
    }


def main() -> None:
    _, count = join()
    path, mib = Path(sys.argv[1]), int(sys.argv[2])
    mesh = DeviceMesh("cpu", torch.arange(count))

    def save(state: dict[str, Any]) -> None:
        writer = FastStorageWriter(path)
        dcp.save(state, storage_writer=writer, planner=FastSavePlanner())

    def load(state: dict[str, Any]) -> None:
        dcp.load(state, storage_reader=FastStorageReader(path), planner=FastLoadPlanner())

    little = state_of(mesh, 2, 1.0, False)
    save(little)
    load(little)
    state = state_of(mesh, mib, 2.0, False)
    peaks = [peak(lambda: save(state))]
    for turned in (False, True):
        del state
        state = state_of(mesh, mib, 0.0, turned)
        peaks.append(peak(lambda: load(state)))  # noqa: B023
        for key in ("rows", "columns"):
            assert bool(torch.all(state[key].to_local() == 2)), key
        assert bool(torch.all(state["all"] == 2))
    print(*peaks)


main()
