"""Random sharded tensors."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

from fastserial.distributed import FlatShard

_GRIDS = {
    1: [(1,), (1, 1)],
    2: [(2,), (2, 1), (1, 2)],
    3: [(3,), (1, 3)],
    4: [(4,), (2, 2), (4, 1), (1, 2, 2), (2, 1, 2)],
    6: [(6,), (2, 3), (3, 2), (1, 3, 2)],
    8: [(8,), (2, 4), (4, 2), (2, 2, 2)],
}
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


def parallel(model: Any, kind: str, *layers: nn.Module) -> Any:
    """Return a module as it is, or as jobs have it: `ddp`; `fsdp`, these layers on their own."""
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind != "fsdp":
        return model
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


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


def hold(chance: random.Random, full: torch.Tensor, grids: list[DeviceMesh], flat: float) -> Any:
    """Return what this rank has of a tensor, which is the same on all: a DTensor, or a FlatShard.

    Args:
        flat: how probable a FlatShard is.
    """
    if chance.random() >= flat:
        return random_dtensor(chance, full, chance.choice(grids))
    rank, count = dist.get_rank(), grids[0].size()
    cuts = sorted(chance.randint(0, full.numel()) for _ in range(count - 1))
    first, stop = [0, *cuts][rank], [*cuts, full.numel()][rank]
    local = full.contiguous().flatten()[first:stop].clone()
    return FlatShard(tuple(full.shape), full.dtype, first, stop - first, local)


class Holder:
    """Holds tensors in any way, in the same ways each time for the same seed: as targets of a load,
    made of zeros, and as what they are to be then.

    Args:
        made: how probable None is, for which a load makes a tensor.
    """

    def __init__(
        self,
        seed: int,
        grids: list[DeviceMesh],
        *,
        flat: float = 0.2,
        made: float = 0.0,
        zeros: bool = False,
    ) -> None:
        self._chance = random.Random(seed)
        self._grids, self._flat, self._made, self._zeros = grids, flat, made, zeros

    def __call__(self, full: torch.Tensor) -> Any:
        kind, seed = self._chance.random(), self._chance.randrange(2**31)
        full = full.detach().resolve_conj().contiguous().clone()
        if kind > 1 - self._made:
            return None if self._zeros else full
        if self._zeros:
            full.zero_()
        if kind < 0.15:
            return full
        if kind < 0.25 and full.dim() > 1:
            return full.transpose(0, 1).contiguous().transpose(0, 1)
        return hold(random.Random(seed), full, self._grids, self._flat)


def random_dtensor(chance: random.Random, full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a tensor distributed at random, sometimes with a strided shard. No traffic."""
    if full.dim() and chance.random() < 0.4:
        return _strided(chance, full, mesh)
    placements = [
        Shard(chance.randrange(full.dim()))
        if full.dim() and chance.random() < 0.75
        else Replicate()
        for _ in range(mesh.ndim)
    ]
    return split(full, mesh, placements)


def split(full: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> DTensor:
    """Return a tensor distributed; each rank takes its part of the whole. No traffic."""
    local = full
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local = _chunk(local, mesh, axis, placement.dim)
    local = local.clone(memory_format=torch.contiguous_format)
    return _from_local(local, mesh, placements, full)


def _strided(chance: random.Random, full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return a DTensor whose first mesh dimension was split last, as FSDP2 does."""
    first = chance.randrange(full.dim())
    dims = [
        first if chance.random() < 0.7 else chance.randrange(full.dim()) for _ in range(mesh.ndim)
    ]
    dims[0] = first
    placements: list[Any] = [Shard(dim) for dim in dims]
    local, factor = full, 1
    for axis in [*range(1, mesh.ndim), 0]:
        local = _chunk(local, mesh, axis, dims[axis])
        if axis and dims[axis] == first:
            factor *= mesh.size(axis)
    if factor > 1:
        placements[0] = _StridedShard(first, split_factor=factor)
    local = local.contiguous()
    if chance.random() < 0.4:  # the same elements, in another order in memory
        back = tuple(reversed(range(local.dim())))
        local = local.permute(back).contiguous().permute(back)
    return _from_local(local, mesh, placements, full)


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
