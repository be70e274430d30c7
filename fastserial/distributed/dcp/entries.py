"""What a rank has of a state: an entry for each key, the same one for similar tensors."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items

from fastserial.distributed.sharding.boxes import Box
from fastserial.distributed.sharding.pieces import as_dtensor, holding
from fastserial.distributed.state.tables import SHARED_FROM
from fastserial.errors import UnknownPlacementError

__all__ = [
    "BYTES",
    "OTHER",
    "REPLICA",
    "SHARD",
    "StateEntry",
    "WritePart",
    "chunk_of",
    "entries_of",
    "kind_of",
    "parts_of",
    "replicas_of",
    "share_in",
    "whole_box",
    "write_items",
]

BYTES, SHARD, REPLICA, OTHER = range(4)  # kinds of entries; REPLICA: a plain tensor
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_GLOBAL = "global_shape"  # torch 2.15: a plain tensor that has it is a part of another one


class StateEntry(NamedTuple):
    """What a rank has under a key.

    Attributes:
        kind: `BYTES`, or which kind of tensor it is.
        properties: of the tensor.
        size: of the whole tensor.
        boxes: what this rank has of it; None: bytes.
    """

    kind: int
    properties: TensorProperties | None = None
    size: tuple[int, ...] = ()
    boxes: tuple[Box | None, ...] = (None,)


class WritePart(NamedTuple):
    """What a rank is to write: a box of a tensor, or bytes; `hint`: which of its chunks it is."""

    key: str
    box: Box | None
    hint: int


def entries_of(state: Mapping[str, Any]) -> dict[str, StateEntry]:
    """Return the entries of a flattened state, of what this rank has something of.

    Raises:
        LoadMismatchError: a placement cannot be saved: `Partial`, say.
    """
    maker = _EntryMaker()
    found = ((key, maker.entry_of(key, value)) for key, value in state.items())
    return {key: entry for key, entry in found if entry is not None}


def replicas_of(entries: Mapping[str, StateEntry]) -> list[str]:
    """Return the keys of the plain tensors that are large enough to be cut."""
    return [
        key
        for key, (kind, properties, size, _) in entries.items()
        if kind == REPLICA
        and properties is not None
        and prod(size) * properties.dtype.itemsize >= SHARED_FROM
    ]


def whole_box(shape: Iterable[int]) -> Box:
    """Return the box of all elements of a tensor."""
    sizes = tuple(shape)
    return Box((0,) * len(sizes), sizes)


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """Return what torch calls a box."""
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def write_items(entries: Mapping[str, StateEntry], parts: Iterable[WritePart]) -> list[WriteItem]:
    """Return the items of the parts that a rank is to write, as torch's planners make them."""
    found: list[WriteItem] = []
    data_of: dict[tuple[int, Box], TensorWriteData] = {}  # by entry: many tensors have the same
    for key, box, hint in parts:
        if box is None:
            found.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
            continue
        entry = entries[key]
        data = data_of.get((id(entry), box))
        if data is None:
            properties: Any = entry.properties
            data = TensorWriteData(chunk_of(box), properties, torch.Size(entry.size))
            data_of[id(entry), box] = data
        whole = entry.kind == REPLICA and box.sizes == entry.size
        type_ = WriteItemType.TENSOR if whole else WriteItemType.SHARD
        index = MetadataIndex(key, None, hint)
        share_in(index, offset=data.chunk.offsets)
        found.append(WriteItem(index=index, type=type_, tensor_data=data))
    return found


def share_in(index: MetadataIndex, **values: Any) -> None:
    """Replace attributes of an index by equal objects that others have, too.

    Each object is pickled once; the constructor of the index would copy them.
    """
    for name, value in values.items():
        object.__setattr__(index, name, value)


class _EntryMaker:
    """Makes entries, the same one for similar tensors: it is pickled once."""

    def __init__(self) -> None:
        self._made: dict[Any, StateEntry] = {}
        self._meshes: dict[int, tuple[int, ...]] = {}
        self._warned = False

    def entry_of(self, key: str, value: Any) -> StateEntry | None:
        """Return the entry of a value, None if this rank has nothing of it."""
        kind = kind_of(value)
        if kind == BYTES:
            return self._made.setdefault(BYTES, StateEntry(BYTES))
        if kind == OTHER:
            return self._other(key, value)
        if kind == REPLICA:
            shape = tuple(value.shape)
            same: Any = (value.dtype, shape, value.stride(), value.layout, value.requires_grad)
        else:
            same = (*_sharding(value), value.requires_grad, value._local_tensor.stride())
        found = self._made.get(same)
        if found is not None:
            return found
        boxes: tuple[Box, ...] = (whole_box(value.shape),)
        local = value
        if kind == SHARD:
            if value.device_mesh.get_coordinate() is None:
                return None
            try:
                boxes = tuple(box for box, _ in parts_of(value, key, self._meshes))
            except UnknownPlacementError as error:
                if not self._warned:  # once of all tensors
                    text = (
                        f"{error}. It is saved as DefaultSavePlanner would, as are others like it"
                    )
                    warnings.warn(text, UserWarning, stacklevel=2)
                self._warned = True
                return self._other(key, value)
            local = value.to_local()
        properties = TensorProperties.create_from_tensor(local)
        made = StateEntry(kind, properties, tuple(value.shape), boxes)
        return self._made.setdefault(same, made)

    def _other(self, key: str, value: Any) -> StateEntry | None:
        """Return what torch says of a sharded tensor of another kind."""
        data = [item.tensor_data for item in _create_write_items(key, value)]
        if not data:
            return None
        if data[0] is None:
            return StateEntry(BYTES)
        chunks = [one.chunk for one in data if one is not None]
        boxes = tuple(Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks)
        return StateEntry(OTHER, data[0].properties, tuple(data[0].size), boxes)


def kind_of(value: object) -> int:
    """Return of which kind the rows of a value are."""
    if type(value) in _PLAIN:
        return OTHER if hasattr(value, _GLOBAL) else REPLICA
    if as_dtensor(value) is not None:
        local = getattr(value, "_local_tensor", None)
        plain = isinstance(local, torch.Tensor) and not hasattr(local, "__create_write_items__")
        return SHARD if plain else OTHER
    if hasattr(value, "__create_write_items__"):
        return OTHER
    if not isinstance(value, torch.Tensor):
        return BYTES
    return OTHER


def parts_of(
    value: Any, key: str, meshes: dict[int, tuple[int, ...]] | None = None
) -> list[tuple[Box, torch.Tensor]]:
    """Return this rank's boxes of a DTensor, each with its part of the local tensor.

    Args:
        meshes: keeps what is found of meshes while they live.
    """
    found = holding(value, key, dist.get_rank(), _all_ranks(dist.get_world_size()), meshes)
    if not found.spec.numel:
        shape = found.spec.shape
        return [(whole_box(shape), found.local.new_empty(shape))]
    return found.parts


def _sharding(value: Any) -> tuple[Any, ...]:
    """Return what decides the boxes of a DTensor.

    Its spec has shape, dtype, mesh and placements; but some releases of torch take a strided shard
    for equal to a plain one.
    """
    factors = [getattr(placement, "split_factor", 1) for placement in value.placements]
    local = value._local_tensor
    return value._spec, local.dtype, local.shape, *factors


@functools.cache
def _all_ranks(count: int) -> dict[int, int]:
    return {rank: rank for rank in range(count)}
