"""A rank of a job whose memory, descriptors and threads are counted: `SCENE FOLDER ...`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support import ranks
from support.limits import peak, status
from support.sharded import noise
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, full

from fastserial import distributed
from fastserial.distributed import (
    FastLoadPlanner,
    FastSavePlanner,
    FastStorageReader,
    FastStorageWriter,
)
from fastserial.errors import DistributedError

MIB = 2**20
PLACEMENTS: list[Any] = [Shard(0), Shard(1), Replicate()]


def mesh_of_all() -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(dist.get_world_size()))


# -- bytes beside the state ------------------------------------------------------------------------


def memory(folder: str, mib: str, how: str) -> None:
    """Save float32 (`how`: in one file, or by dcp), and load it as it was, and otherwise.

    Prints the most bytes that the process had during each, less those that it had before.
    """
    path, mesh = Path(folder) / "file", mesh_of_all()

    def state_of(mib: int, value: int, turn: int = 0, dtype: Any = torch.float32) -> dict[str, Any]:
        shape = (mib * MIB // 4 // 4 // 1024, 1024)
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
    state = state_of(int(mib), 2)
    peaks = [peak(lambda: save(state))]
    for turn, dtype in ((0, torch.float32), (1, torch.float32), (2, torch.bfloat16)):
        state = state_of(int(mib), 0, turn, dtype)
        peaks.append(peak(partial(load, state)))
        for value in state.values():
            assert bool(torch.all(getattr(value, "_local_tensor", value) == 2))
    print(*peaks)


# -- under a limit ---------------------------------------------------------------------------------


def limited(folder: str, tasks: str, nbytes: str, budget: str) -> None:
    """Save a state of so many bytes in the background, all ranks together, and change it meanwhile.

    Prints the bytes copied at each of three calls.
    """
    Path(tasks).write_text(str(os.getpid()))
    tensors, columns, mesh = 16, 1024, mesh_of_all()
    rows = int(nbytes) // (tensors * 4 * columns * mesh.size())
    state: dict[str, Any] = {
        str(number): DTensor.from_local(
            torch.full((rows, columns), float(number)), mesh, [Shard(0)], run_check=False
        )
        for number in range(tensors)
    }
    limit = None if budget == "-" else int(budget)
    for _ in range(3):
        saving = distributed.save_async(state, f"{folder}/state.pt", snapshot_budget=limit)
        for value in state.values():
            value.to_local().add_(1)
        report = saving.wait()
        assert report.snapshot is not None
        print(report.snapshot.copied)


# -- many saves ------------------------------------------------------------------------------------


def use() -> tuple[int, int, int]:
    """Return bytes of memory, descriptors and threads of this process."""
    return status("VmRSS"), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def growth(folder: str, count: str) -> None:
    """Many saves and loads, some of which fail, leave nothing behind."""
    world, mesh, path = dist.get_world_size(), mesh_of_all(), Path(folder, "file.pt")
    local = noise([1200, 500], torch.float32, 3).chunk(world)[dist.get_rank()].clone()
    before = (0, 0, 0)
    for step in range(int(count)):
        if step == 20:
            before = use()
        # Now and then another plan; the widths come again.
        rows = DTensor.from_local(local[:, : 500 - step % 3], mesh, [Shard(0)], run_check=False)
        state = {"rows": rows, "step": step}
        if step % 10 == 5 and dist.get_rank() == step // 10 % 4:
            state["more"] = torch.zeros(2)
        try:
            distributed.save(state, path, timeout=60)
            distributed.load(path, {"rows": rows, "step": 0}, timeout=60)
            assert step % 10 != 5
        except DistributedError:
            assert step % 10 == 5
    after = use()
    assert after[0] - before[0] < 16 * MIB, (before, after)
    assert after[1] <= before[1], (before, after)
    # Those of connections that failed end a little later.
    assert after[2] - before[2] < 4, (before, after)


ranks.main(globals())
