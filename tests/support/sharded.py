"""Random sharded tensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

_GRIDS = {
    1: [(1,), (1, 1)],
    2: [(2,), (2, 1), (1, 2)],
    3: [(3,), (1, 3)],
    4: [(4,), (2, 2), (4, 1), (1, 2, 2), (2, 1, 2)],
    6: [(6,), (2, 3), (3, 2), (1, 3, 2)],
    8: [(8,), (2, 4), (4, 2), (2, 2, 2)],
}
# Before, it always scatters, and fails for tensors without elements.
_SPLITS_LOCALLY = "src_data_rank" in signature(distribute_tensor).parameters
DTYPES = [
    torch.float32,
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float64,
    torch.complex128,
    torch.float16,
]
# No storage of the legacy format has these, and torch hardly computes with them.
NEWER = [torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2fnuz]
DTYPES += NEWER
CHANGES = ("nothing", "bytes", "half", "placement", "dtype", "shape", "grad", "gone", "order")


def meshes(count: int) -> list[DeviceMesh]:
    """Return meshes over all ranks. Collective."""
    return [
        DeviceMesh("cpu", torch.arange(count).view(grid)) for grid in _GRIDS.get(count, [(count,)])
    ]


def random_tensor(
    chance: random.Random, largest: int = 9, dims: int = 4, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a tensor of a random shape, often tiny, sometimes empty, the same on every rank."""
    shape = [chance.randrange(largest + 1) for _ in range(chance.randrange(dims + 1))]
    return noise(shape, dtype or chance.choice(DTYPES), chance.randrange(2**31))


def noise(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random bytes as a tensor, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape and bytes."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = (t.detach().contiguous().flatten().view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def vary(
    chance: random.Random,
    state: dict[str, Any],
    whole: dict[str, Any],
    hold: Callable[[torch.Tensor], Any],
) -> None:
    """Change one tensor of a state and of its whole, as it happens from one save to the next.

    Args:
        hold: returns what this rank has of a tensor, which is the same on all.
    """
    keys = [key for key, full in whole.items() if isinstance(full, torch.Tensor)]
    if not keys:
        return
    key, change = chance.choice(keys), chance.choice(CHANGES)
    old, full = state[key], whole[key]
    tied = [name for name in state if state[name] is old]
    if change == "gone" and len(state) > 1:
        del state[key], whole[key]
    elif change == "order":
        state[key], whole[key] = state.pop(key), whole.pop(key)
    elif change in ("bytes", "half"):  # of a DTensor, whose own type stays
        shard = getattr(old, "_local_tensor", getattr(old, "tensor", old))
        value = chance.randrange(2)
        with torch.no_grad():
            for one in (shard, full):
                one.fill_(value)
        if change == "half" and isinstance(old, DTensor) and full.dtype is torch.float32:
            old._local_tensor = shard.detach().half()
            whole.update(dict.fromkeys(tied, full.detach().half()))
    elif change not in ("nothing", "gone"):
        shape = [*full.shape, 2] if change == "shape" else list(full.shape)
        dtype = chance.choice(DTYPES) if change == "dtype" else full.dtype
        full = noise(shape, dtype, chance.randrange(2**31))
        held = hold(full)
        if change == "grad" and full.is_floating_point() and isinstance(held, DTensor):
            full = full.clone().requires_grad_(True)
            held.requires_grad_(True)
        state.update(dict.fromkeys(tied, held))
        whole.update(dict.fromkeys(tied, full))


def random_placements(chance: random.Random, ndim: int, mesh: DeviceMesh) -> list[Any]:
    """Return placements for a tensor of `ndim` dimensions."""
    return [
        Shard(chance.randrange(ndim)) if ndim and chance.random() < 0.75 else Replicate()
        for _ in range(mesh.ndim)
    ]


def random_dtensor(chance: random.Random, full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a tensor distributed at random, sometimes with a strided shard. Collective."""
    placements = random_placements(chance, full.dim(), mesh)
    if full.dim() and chance.random() < 0.4:
        return strided(chance, full, mesh)
    return split(full, mesh, placements)


def split(full: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> DTensor:
    """Return a tensor distributed; each rank takes its part of the whole that it has."""
    if _SPLITS_LOCALLY:
        return distribute_tensor(full, mesh, placements, src_data_rank=None)
    local = full
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local = _chunk(local, mesh, axis, placement.dim)
    return _from_local(local.contiguous(), mesh, placements, full)


def split_last(full: torch.Tensor, mesh: DeviceMesh, dims: list[int | None]) -> DTensor:
    """Return a DTensor whose first mesh dimension was split last, as FSDP2 does. No traffic.

    Args:
        dims: of the tensor, which the dimensions of the mesh split; None: not.
    """
    local, placements = _split_last(full, mesh, dims)
    return _from_local(local.contiguous(), mesh, placements, full)


def strided(chance: random.Random, full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a DTensor whose first mesh dimension was split last, at random. No traffic."""
    dim = chance.randrange(full.dim())
    dims: list[int | None] = [
        dim if chance.random() < 0.7 else chance.randrange(full.dim()) for _ in range(mesh.ndim)
    ]
    local, placements = _split_last(full, mesh, [dim, *dims[1:]])
    local = local.contiguous()
    if chance.random() < 0.4:  # the same elements, in another order in memory
        back = tuple(reversed(range(local.dim())))
        local = local.permute(back).contiguous().permute(back)
    return _from_local(local, mesh, placements, full)


def _split_last(
    full: torch.Tensor, mesh: DeviceMesh, dims: list[int | None]
) -> tuple[torch.Tensor, list[Any]]:
    placements: list[Any] = [Replicate() if dim is None else Shard(dim) for dim in dims]
    local, factor = full, 1
    for axis in [*range(1, mesh.ndim), 0]:
        dim = dims[axis]
        if dim is None:
            continue
        local = _chunk(local, mesh, axis, dim)
        if axis and dim == dims[0]:
            factor *= mesh.size(axis)
    if dims[0] is not None and factor > 1:
        placements[0] = _StridedShard(dims[0], split_factor=factor)
    return local, placements


def _chunk(tensor: torch.Tensor, mesh: DeviceMesh, axis: int, dim: int) -> torch.Tensor:
    """Return this rank's chunk, which may be empty."""
    place = mesh.get_coordinate()
    assert place is not None
    chunks = list(tensor.chunk(mesh.size(axis), dim))
    chunks += [tensor.narrow(dim, 0, 0)] * (mesh.size(axis) - len(chunks))
    return chunks[place[axis]]


def _from_local(
    local: torch.Tensor, mesh: DeviceMesh, placements: list[Any], full: torch.Tensor
) -> DTensor:
    stride = full.contiguous().stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=stride
    )
