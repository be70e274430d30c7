"""A rank of two: saves over a checkpoint, and fails in the middle. Arguments: folder, who.

`who` is `ours` or `stock`. Each rank prints the steps of the tensors that are loaded then.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from support.ranks import join
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fastserial.distributed import FastStorageReader, FastStorageWriter


class Failing(DefaultSavePlanner):
    """Fails on rank 1, at its second tensor."""

    def resolve_data(self, write_item: Any) -> Any:
        if write_item.index.fqn == "b" and not self.is_coordinator:
            raise OSError("the disk is gone")
        return super().resolve_data(write_item)


def state_of(mesh: DeviceMesh, step: int) -> dict[str, Any]:
    return {
        key: DTensor.from_local(torch.full((1 << 18,), step), mesh, [Shard(0)]) for key in "abc"
    }


def main() -> None:
    _, count = join()
    path, ours = Path(sys.argv[1]), sys.argv[2] == "ours"
    mesh = DeviceMesh("cpu", torch.arange(count))

    def writer() -> Any:
        return FastStorageWriter(path) if ours else dcp.FileSystemWriter(path)

    dcp.save(state_of(mesh, 1), storage_writer=writer())
    try:
        dcp.save(state_of(mesh, 2), storage_writer=writer(), planner=Failing())
    except CheckpointException as error:
        assert "the disk is gone" in str(error), error
    else:
        raise AssertionError("it did not fail")
    found = state_of(mesh, 0)
    reader = FastStorageReader(path) if ours else dcp.FileSystemReader(path)
    try:
        dcp.load(found, storage_reader=reader)
        print(*sorted({int(x) for key in "abc" for x in found[key].to_local().unique()}))
    except CheckpointException:
        print("unreadable")
    dcp.save(state_of(mesh, 3), storage_writer=writer())
    dcp.load(found, storage_reader=reader)
    assert all(bool(torch.all(found[key].to_local() == 3)) for key in "abc")


main()
