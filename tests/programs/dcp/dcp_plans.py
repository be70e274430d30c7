"""A rank of four: saves in which something changes from one to the next. Argument: folder.

Rank 0 prints how many of them were planned anew.
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
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fastserial.distributed import FastSavePlanner, FastStorageReader, FastStorageWriter
from fastserial.distributed.dcp import planners

State = dict[str, Any]
PLANNED: list[str] = []


class Broken:
    def __reduce__(self) -> Any:
        raise ValueError("broken")


def state_of(mesh: DeviceMesh, step: int, placement: Any, dtype: torch.dtype) -> State:
    rows = torch.arange(64 * 48).view(64, 48).to(dtype) + step
    return {
        "model": {
            "rows": distribute_tensor(rows, mesh, [placement]),
            "all": distribute_tensor(rows + 1, mesh, [Replicate()]),
            "large": (torch.arange(1 << 20) + step).float(),
        },
        "step": step,
    }


def check(path: Path, state: State, group: Any) -> None:
    """Load what was saved, into zeros of the same kind, and compare."""

    def blank(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: blank(item) for key, item in value.items()}
        return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        if isinstance(a, DTensor):
            return same(a.to_local(), b.to_local())
        if isinstance(a, torch.Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        return bool(a == b)

    found = blank(state)
    dcp.load(found, storage_reader=FastStorageReader(path), process_group=group)
    assert same(found, state), (path, found, state)
    metadata = FastStorageReader(path).read_metadata().state_dict_metadata
    dtype: Any = metadata["model.rows"]
    assert dtype.properties.dtype == state["model"]["rows"].to_local().dtype


def main() -> None:
    rank, count = join()
    folder = Path(sys.argv[1])
    mesh = DeviceMesh("cpu", torch.arange(count))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair_mesh = DeviceMesh.from_group(pairs[rank // 2], "cpu")
    divide = planners.divide

    def counted(*args: Any) -> Any:
        PLANNED.append(name)
        return divide(*args)

    planners.divide = counted
    float32, half = torch.float32, torch.bfloat16

    def key_on_all(state: State) -> None:
        state["model"]["more"] = torch.ones(3)

    def key_on_one(state: State) -> None:
        if rank == 2:
            state["only"] = torch.ones(5)

    def shape_on_one(state: State) -> None:
        if rank == 2:
            state["only"] = torch.ones(7)

    def other_nest(state: State) -> None:
        state["model.bias"] = state["model"].pop("more", torch.ones(2))

    def type_of_shards(state: State) -> None:
        key_on_one(state)
        rows = state["model"]["rows"]
        rows._local_tensor = rows._local_tensor.float()

    def nothing(state: State) -> None:
        pass

    steps: list[tuple[str, Any, torch.dtype, Callable[[State], None], bool]] = [
        # name, placement, dtype, what is different, whether it is planned anew
        ("first", Shard(0), float32, nothing, True),
        ("again", Shard(0), float32, nothing, False),
        ("dtype", Shard(0), half, nothing, True),
        ("dtype again", Shard(0), half, nothing, False),
        ("sharding", Shard(1), half, nothing, True),
        ("key", Shard(1), half, key_on_all, True),
        ("key on one", Shard(1), half, key_on_one, True),
        ("key on one again", Shard(1), half, key_on_one, False),
        ("shape on one", Shard(1), half, shape_on_one, True),
        ("nest", Shard(1), half, other_nest, True),
        ("back", Shard(1), half, key_on_one, False),
        ("type of the shards", Shard(1), half, type_of_shards, True),
    ]
    for step, (name, placement, dtype, change, anew) in enumerate(steps):
        state = state_of(mesh, step, placement, dtype)
        change(state)
        before = len(PLANNED)
        path = folder / name
        dcp.save(state, storage_writer=FastStorageWriter(path), planner=FastSavePlanner())
        if rank == 0:
            assert (len(PLANNED) > before) == anew, (name, PLANNED)
        check(path, state, None)
    for name in ("fails", "fails again"):
        state = state_of(mesh, 50, Shard(1), half)
        if rank == 1:
            local = torch.zeros(3)
            state["sum"] = DTensor.from_local(local, mesh, [Partial()], run_check=False)
        writer = FastStorageWriter(folder / name)
        try:
            dcp.save(state, storage_writer=writer, planner=FastSavePlanner())
        except CheckpointException as error:
            assert "a sum that no rank has" in str(error), error
        else:
            raise AssertionError("a Partial was saved")
        state = state_of(mesh, 51, Shard(1), half)
        state["broken"] = Broken() if rank == 0 else None
        try:
            dcp.save(state, storage_writer=writer, planner=FastSavePlanner())
        except CheckpointException as error:
            assert "broken" in str(error), error
        else:
            raise AssertionError("what cannot be pickled was saved")
    for name, group, own in (("world", None, mesh), ("pair", pairs[rank // 2], pair_mesh)) * 3:
        if group is not None and rank >= 2 and torch.__version__.startswith("2.6."):
            continue  # there DCP coordinates by global rank 0, which has to be in the group
        state = state_of(own, 60, Shard(0), half)
        path = folder / f"{name} {rank // 2 if group is not None else ''}"
        dcp.save(
            state,
            storage_writer=FastStorageWriter(path),
            planner=FastSavePlanner(),
            process_group=group,
        )
        check(path, state, group)
    if rank == 0:
        print(PLANNED.count("world"), PLANNED.count("pair"))


main()
