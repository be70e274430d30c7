"""States of a rank of `fastserial bench dcp`, and blank ones of the same kind to load into."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fastserial.bench.studies.dcp_plan import MIXED, PLANNED, SMALL, DcpBench
from fastserial.bench.subjects.payload import fill, tensor_sizes

__all__ = ["blank_of", "same", "state_of", "wipe"]

_WIDTH = 64  # elements of a row
_SMALL = 8  # elements of a small tensor: 32 bytes
_ITEM = torch.float32.itemsize

State = dict[str, Any]


def state_of(case: str, bench: DcpBench) -> State:
    """Return this rank's state. Those of a case are equal in each run."""
    ranks = dist.get_world_size()
    mesh = DeviceMesh("cpu", torch.arange(ranks))
    # A small state is the same on all ranks; of the others each has its rows.
    generator = torch.Generator().manual_seed(0 if case == SMALL else dist.get_rank())

    def rows(count: int, width: int) -> DTensor:
        local = torch.empty(count, width)
        fill(local, generator)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    tensors: list[torch.Tensor]
    if case == MIXED:
        unit = ranks * _WIDTH * _ITEM
        sizes = tensor_sizes(bench.nbytes, bench.tensors)
        tensors = [rows(max(1, round(nbytes / unit)), _WIDTH) for nbytes in sizes]
    elif case == SMALL:
        tensors = [torch.rand(_SMALL, generator=generator) for _ in range(bench.small)]
    elif case == PLANNED:
        tensors = [rows(1, _WIDTH) for _ in range(bench.planned)]
    else:
        tensors = [rows(1, _SMALL) for _ in range(bench.small)]
    return {"model": {f"layers.{i}.weight": one for i, one in enumerate(tensors)}, "step": 1}


def blank_of(state: State) -> State:
    """Return a state of the same kind into which it can be loaded."""
    return {"model": {name: _blank(one) for name, one in state["model"].items()}, "step": 0}


def wipe(state: State) -> None:
    """Remove what was loaded."""
    state["step"] = 0
    for tensor in state["model"].values():
        _local(tensor).zero_()


def same(one: State, other: State) -> bool:
    """Return whether two states are equal, bit by bit."""
    pairs = ((tensor, other["model"][name]) for name, tensor in one["model"].items())
    return one["step"] == other["step"] and all(
        torch.equal(_local(a).view(torch.int32), _local(b).view(torch.int32)) for a, b in pairs
    )


def _blank(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return torch.zeros_like(tensor)
    local = torch.zeros_like(tensor.to_local())
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
