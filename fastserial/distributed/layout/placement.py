"""What a rank holds of a tensor, and what every other rank holds of it.

A `TensorSpec` is plain data: with it every rank knows what every other one holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from math import prod
from typing import Any, NamedTuple

import torch

from fastserial.distributed.layout.boxes import Box, boxes_of_range
from fastserial.distributed.layout.flat_shard import FlatShard
from fastserial.errors import LoadMismatchError, UnknownPlacementError
from fastserial.formats.tensors import reach
from fastserial.interrupts import ours

Range = tuple[int, int]
_PLAIN = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}
_KEPT = 16  # grids whose indices are kept
_indices: dict[int, tuple[tuple[int, ...], dict[int, int]]] = {}


class DimShard(NamedTuple):
    """How a mesh dimension splits a tensor.

    Attributes:
        dim: which dimension of the tensor; None: not at all, it is replicated.
        factor: of a `_StridedShard`; 1 for `Shard`.
    """

    dim: int | None
    factor: int = 1


class Mesh(NamedTuple):
    """Ranks in a grid.

    Attributes:
        shape: of the grid.
        grids: its ranks of the group, in row-major order; -1 for one that the group lacks. There
            are several where each of some sub-meshes has the whole tensor.
        splits: what each dimension of the grid does to the tensor.
    """

    shape: tuple[int, ...]
    grids: tuple[tuple[int, ...], ...]
    splits: tuple[DimShard, ...]

    def __hash__(self) -> int:
        return hash((self.shape, self.splits))  # of all ranks it would take long for each tensor

    def index_of(self, rank: int) -> int | None:
        """Return a rank's row-major index in its grid, None if it is in none."""
        for grid in self.grids:
            index = indices_of(grid).get(rank)
            if index is not None:
                return index
        return None

    def shard_of(self, rank: int, size: int) -> int | None:
        """Return which shard a rank has: the same number on all ranks that have its replicas.

        None: it has none, or no other rank may have a replica of it. One outside of the grid may:
        on a mesh of its own.

        Args:
            size: of the group.
        """
        index = self.index_of(rank)
        is_split = all(one.dim is not None for one in self.splits)
        if index is None or (is_split and len(self.members()) == size and len(self.grids) == 1):
            return None
        number, step = 0, 1
        for size, split in zip(reversed(self.shape), reversed(self.splits), strict=True):
            index, at = divmod(index, size)
            number += step * at if split.dim is not None else 0
            step *= size
        return number

    def members(self) -> list[int]:
        """Return all ranks that hold something."""
        return sorted({rank for grid in self.grids for rank in grid if rank >= 0})


def indices_of(grid: tuple[int, ...]) -> dict[int, int]:
    """Return the index of each rank in a grid, without those that the group lacks.

    It is kept for the last few grids, by their identity: to hash one takes as long as a search.
    """
    kept = _indices.get(id(grid))
    if kept is None or kept[0] is not grid:
        if len(_indices) >= _KEPT:
            _indices.clear()
        found = {rank: index for index, rank in enumerate(grid) if rank >= 0}
        kept = _indices[id(grid)] = grid, found
    return kept[1]


class Flat(NamedTuple):
    """Flat ranges.

    Attributes:
        ranges: of each rank that holds some: rank, first element, end.
    """

    ranges: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as all ranks together hold it.

    Attributes:
        shape, dtype: of the whole.
        held: by whom; None: every rank holds all of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    held: Mesh | Flat | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class Holding(NamedTuple):
    """What this rank holds.

    Attributes:
        spec: the tensor. Of a FlatShard it knows this rank's range only.
        local: this rank's tensor as it is.
        parts: the boxes, each with a view of it in `local`.
    """

    spec: TensorSpec
    local: torch.Tensor
    parts: list[tuple[Box, torch.Tensor]]


def unloadable(leaf: torch.Tensor) -> str | None:
    """Return why a load could not fill a tensor of one rank, None if it could."""
    if type(leaf) not in _PLAIN:
        what = f"of the class {type(leaf).__name__}"
    elif leaf.is_nested:
        what = "nested"
    elif leaf.layout is not torch.strided:
        what = f"of the layout {leaf.layout}"
    elif leaf.is_quantized:
        what = "quantized"
    elif leaf.device.type == "meta":
        what = "without memory (device meta)"
    else:
        return None
    return (
        f"it is {what}, and ranks could not load it again; save plain tensors from which it can "
        "be made"
    )


def as_dtensor(leaf: object) -> Any | None:
    """Return a leaf if it is a DTensor. Imports nothing: without the module there is none."""
    import sys

    module = sys.modules.get("torch.distributed.tensor")
    return leaf if module is not None and isinstance(leaf, module.DTensor) else None


def is_sharded(leaf: object) -> bool:
    """Return whether a rank may hold a part of a leaf only."""
    return isinstance(leaf, FlatShard) or as_dtensor(leaf) is not None


def is_over_plain(sharded: Any) -> bool:
    """Return whether the shards of a DTensor are plain tensors, which may be read as memory.

    Those of another class (quantized ones, say) may consist of several tensors, or of none.
    """
    kind = type(sharded._local_tensor)
    return kind in _PLAIN or kind.__name__ == "AsyncCollectiveTensor"


def holding(
    leaf: object,
    key: str,
    rank: int,
    ranks: Mapping[int, int],
    known: dict[int, tuple[int, ...]] | None = None,
) -> Holding:
    """Return what this rank holds of a leaf: a tensor, a DTensor or a FlatShard.

    Args:
        key: the leaf's name, for errors.
        rank: this rank in the group.
        ranks: the group's rank of each global rank.
        known: keeps what is found of meshes, by their `id`, while they live.

    Raises:
        LoadMismatchError: a placement cannot be in a file: `Partial`, say.
    """
    if isinstance(leaf, FlatShard):
        try:
            leaf.check()
        except ours(ValueError) as error:
            raise LoadMismatchError(f"{key}: {error}") from error
        ranges = ((rank, leaf.start, leaf.start + leaf.length),) if leaf.length else ()
        spec = TensorSpec(leaf.param_shape, leaf.dtype, Flat(ranges))
        return Holding(spec, leaf.tensor, views(spec, rank, leaf.tensor))
    sharded = as_dtensor(leaf)
    if sharded is not None:
        if not is_over_plain(sharded):
            raise LoadMismatchError(
                f"{key}: its shards are of the class {type(sharded._local_tensor).__name__}, whose "
                "memory only that class knows; save with torch.distributed.checkpoint, or the "
                "plain tensors from which it can be made"
            )
        with torch.no_grad():
            local: torch.Tensor = sharded.to_local()
        # The shards' own type: a DTensor made by hand may say another one.
        spec = TensorSpec(tuple(sharded.shape), local.dtype, _mesh(sharded, key, ranks, known))
        return Holding(spec, local.detach(), views(spec, rank, local.detach(), key))
    if isinstance(leaf, torch.Tensor):
        spec = TensorSpec(tuple(leaf.shape), leaf.dtype)
        return Holding(spec, leaf.detach(), views(spec, rank, leaf.detach()))
    raise TypeError(f"{key} is not a tensor but a {type(leaf).__name__}")


def local_of(leaf: Any, key: str = "") -> torch.Tensor:
    """Return this rank's tensor of a leaf, without its history.

    Raises:
        LoadMismatchError: its memory is less than what it has elements for.
    """
    local: torch.Tensor = leaf.tensor if isinstance(leaf, FlatShard) else leaf
    if as_dtensor(leaf) is not None:
        with torch.no_grad():
            local = leaf.to_local()
    local = local.detach()
    if local._is_zerotensor():
        return local.clone()  # as it is, it has no memory
    if type(local) is torch.Tensor and local.layout is torch.strided and local.numel():
        end = int(local.storage_offset()) + reach(local.shape, local.stride())
        there, needed = local.untyped_storage().nbytes(), end * local.element_size()
        if there < needed:
            raise LoadMismatchError(
                f"{key}: its shard needs {needed} bytes, but its storage was resized to {there}"
            )
    return local


def boxes_on(spec: TensorSpec, rank: int) -> list[Box]:
    """Return the boxes that a rank holds, in the order in which its local tensor has them."""
    held = spec.held
    if isinstance(held, Flat):
        return [
            box
            for owner, first, stop in held.ranges
            if owner == rank
            for box in boxes_of_range(spec.shape, first, stop)
        ]
    if isinstance(held, Mesh):
        index = held.index_of(rank)
        return [] if index is None else boxes_at(spec.shape, held._replace(grids=()), index)
    return [Box((0,) * len(spec.shape), spec.shape)] if spec.numel else []


@lru_cache(maxsize=65536)
def boxes_at(shape: tuple[int, ...], mesh: Mesh, index: int) -> list[Box]:
    """Return the boxes at a row-major index of the mesh."""
    ranges = _ranges_at(shape, mesh, index)
    return [
        Box(tuple(first for first, _ in cut), tuple(stop - first for first, stop in cut))
        for cut in product(*ranges)
    ]


def _ranges_at(shape: tuple[int, ...], mesh: Mesh, index: int) -> list[list[Range]]:
    """Return, for each dimension of the tensor, the ranges that are held, without empty ones."""
    at_axis: list[int] = []
    for size in reversed(mesh.shape):
        index, at = divmod(index, size)
        at_axis.insert(0, at)
    found = [[(0, size)] if size else [] for size in shape]
    for dim in range(len(shape)):
        for axis, factor in split_order(dim, mesh):
            found[dim] = _chunk(found[dim], mesh.shape[axis], at_axis[axis], factor)
    return found


def split_order(dim: int, mesh: Mesh) -> list[tuple[int, int]]:
    """Return which mesh dimensions split a tensor's dimension, in their order.

    Each has the factor with which it has to be split. A strided shard was made after those
    to its right, as FSDP2 over tensor parallelism does.
    """
    axes = [(axis, split.factor) for axis, split in enumerate(mesh.splits) if split.dim == dim]
    if all(factor == 1 for _, factor in axes):
        return axes
    order: list[int] = []
    for axis, factor in reversed(axes):
        # A strided shard was made after `factor` shards; a plain one before all to its right.
        after, shards = 0, 1
        while shards < factor and after < len(order):
            shards *= mesh.shape[order[after]]
            after += 1
        if shards != factor:
            return axes
        order.insert(after, axis)
    return [(axis, 1) for axis in order]


def _chunk(ranges: list[Range], count: int, index: int, factor: int) -> list[Range]:
    """Return chunk `index` of `count` of what the ranges hold in their order.

    With a factor: of each of `factor` chunks.
    """
    total = sum(stop - first for first, stop in ranges)
    found: list[Range] = []
    for begin, end in _bounds(total, factor):
        step = -(-(end - begin) // count)
        first = min(begin + index * step, end)
        found += _within(ranges, first, min(first + step, end))
    return found


def _bounds(total: int, count: int) -> Iterator[Range]:
    step = -(-total // count)
    for index in range(count):
        first = min(index * step, total)
        yield first, min(first + step, total)


def _within(ranges: list[Range], begin: int, end: int) -> Iterator[Range]:
    """Return elements [begin, end) of what the ranges hold."""
    at = 0
    for first, stop in ranges:
        low, high = max(begin - at, 0), min(end - at, stop - first)
        if low < high:
            yield first + low, first + high
        at += stop - first


def views(
    spec: TensorSpec, rank: int, local: torch.Tensor, key: str = ""
) -> list[tuple[Box, torch.Tensor]]:
    """Return the boxes of this rank with their views of the local tensor."""
    if isinstance(spec.held, Flat):
        parts, at = [], 0
        for box in boxes_on(spec, rank):
            parts.append((box, local.narrow(0, at, box.numel).view(box.sizes)))
            at += box.numel
        return parts
    if spec.held is None:
        return [(box, local) for box in boxes_on(spec, rank)]
    boxes = boxes_on(spec, rank)
    if len(boxes) == 1 and boxes[0].sizes == local.shape:
        return [(boxes[0], local)]
    ranges = _ranges_at(spec.shape, spec.held, spec.held.index_of(rank) or 0)
    shape = tuple(sum(stop - first for first, stop in cut) for cut in ranges) if boxes else (0,)
    if local.shape != shape and (local.numel() or boxes):
        raise LoadMismatchError(
            f"{key}: the shard here has the shape {tuple(local.shape)}, which is not what its "
            f"placements {spec.held.splits} make of {spec.shape}"
        )
    # Along each dimension the ranges are consecutive in the local tensor.
    cuts = []
    for ranges_of_dim in ranges:
        starts = accumulate((stop - first for first, stop in ranges_of_dim), initial=0)
        cuts.append(list(zip(ranges_of_dim, starts, strict=False)))
    parts = []
    for cut in product(*cuts):
        box = Box(tuple(first for (first, _), _ in cut), tuple(b - a for (a, b), _ in cut))
        parts.append((box, local[tuple(slice(at, at + b - a) for (a, b), at in cut)]))
    return parts


def _mesh(
    sharded: Any, key: str, ranks: Mapping[int, int], known: dict[int, tuple[int, ...]] | None
) -> Mesh:
    mesh = sharded.device_mesh
    splits = tuple([_split(placement, key) for placement in sharded.placements])
    found = known.get(id(mesh)) if known is not None else None
    if found is None:
        found = tuple(ranks.get(rank, -1) for rank in in_place(mesh.mesh.tolist()))
        if known is not None:
            known[id(mesh)] = found
    return Mesh(tuple(mesh.shape), (found,), splits)


def in_place(mesh: Any) -> list[int]:
    """Return the ranks of a mesh in the order in which they hold the shards, row-major.

    torch gives a rank its shard by its rank in the process group of a mesh dimension, and a group
    orders its ranks by their number, however the mesh has them.
    """
    grid = torch.tensor(mesh, device="cpu")
    for axis in range(grid.dim()):
        grid = grid.sort(axis).values
    return [int(rank) for rank in grid.flatten().tolist()]


def _split(placement: Any, key: str) -> DimShard:
    if placement.is_replicate():
        return DimShard(None)
    if placement.is_partial():
        raise LoadMismatchError(
            f"{key}: it is {placement}, a sum that no rank has; redistribute it first "
            "(`tensor.redistribute(placements=[Replicate(), ...])`)"
        )
    dim = getattr(placement, "dim", None)
    if dim is None:
        raise UnknownPlacementError(
            f"{key}: its placement {type(placement).__name__} is unknown to fastserial; pass the "
            "part of this rank as a FlatShard, or redistribute it to Shard or Replicate"
        )
    return DimShard(int(dim), int(getattr(placement, "split_factor", 1)))
