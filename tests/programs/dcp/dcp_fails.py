"""A rank of two: saves over a checkpoint, and fails in the middle. Arguments: folder, who.

`who` is `ours` or `stock`. Each rank prints the steps of the tensors that are loaded then.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.ranks import join
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from fastserial.distributed import FastSavePlanner, FastStorageReader, FastStorageWriter


class Failing(DefaultSavePlanner):
    """Fails on rank 1, at its second tensor."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "b" and not self.is_coordinator:
            raise OSError("the disk is gone")
        return super().resolve_data(write_item)


class Broken:
    def __reduce__(self) -> Any:
        raise ValueError("cannot be pickled")


def main() -> None:
    rank, count = join()
    path, ours = Path(sys.argv[1]), sys.argv[2] == "ours"
    mesh = DeviceMesh("cpu", torch.arange(count))

    def state_of(step: int) -> dict[str, Any]:
        shards = {key: torch.full((1 << 18,), step) for key in "abc"}
        return {key: DTensor.from_local(one, mesh, [Shard(0)]) for key, one in shards.items()}

    def save(step: int, planner: Any = None, **more: Any) -> None:
        writer: Any = FastStorageWriter(path) if ours else dcp.FileSystemWriter(path)
        dcp.save({**state_of(step), **more}, storage_writer=writer, planner=planner)

    save(1)
    with pytest.raises(CheckpointException, match="the disk is gone"):
        save(2, Failing())
    if ours:
        odd = DTensor.from_local(torch.zeros(3), mesh, [Partial() if rank else Shard(0)])
        with pytest.raises(CheckpointException, match="a sum that no rank has"):
            save(2, FastSavePlanner(), sum=odd)
        with pytest.raises(CheckpointException, match="cannot be pickled"):
            save(2, FastSavePlanner(), broken=None if rank else Broken())
    found = state_of(0)
    reader = FastStorageReader(path) if ours else dcp.FileSystemReader(path)
    try:
        dcp.load(found, storage_reader=reader)
        print(*sorted({int(x) for key in "abc" for x in found[key].to_local().unique()}))
    except CheckpointException:
        print("unreadable")
    save(3)
    dcp.load(found, storage_reader=reader)
    assert all(bool(torch.all(found[key].to_local() == 3)) for key in "abc")


main()
