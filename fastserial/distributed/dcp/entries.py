"""What a rank has of a state: an entry for each key, the same one for tensors that are alike."""

from __future__ import annotations

import functools
import sys
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
    "Entry",
    "Part",
    "entries_of",
    "kind_of",
    "parts_of",
    "replicas_of",
    "same_key",
    "write_items",
]

BYTES, SHARD, REPLICA, OTHER = range(4)  # kinds of entries; REPLICA: a plain tensor
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_GLOBAL = "global_shape"  # torch 2.15: a plain tensor that has it is a part of another one


class Entry(NamedTuple):
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


class Part(NamedTuple):
    """What a rank is to write: a box of a tensor, or bytes; `hint`: which of its chunks it is."""

    key: str
    box: Box | None
    hint: int


def entries_of(state: Mapping[str, Any]) -> dict[str, Entry]:
    """Return the entries of a flattened state, of what this rank has something of.

    Raises:
        LoadMismatchError: a placement cannot be saved: `Partial`, say.
    """
    making = _Entries()
    found = ((key, making.of(key, value)) for key, value in state.items())
    return {key: entry for key, entry in found if entry is not None}


def replicas_of(entries: Mapping[str, Entry]) -> list[str]:
    """Return the keys of the plain tensors that are large enough to be cut."""
    return [
        key
        for key, (kind, properties, size, _) in entries.items()
        if kind == REPLICA
        and properties is not None
        and prod(size) * properties.dtype.itemsize >= SHARED_FROM
    ]


def same_key(key: str) -> str:
    """Return the same object for equal keys: it is pickled once."""
    return sys.intern(key) if type(key) is str else key


def write_items(entries: Mapping[str, Entry], parts: Iterable[Part]) -> list[WriteItem]:
    """Return what stock calls parts of what a rank has."""
    found: list[WriteItem] = []
    alike: dict[Any, tuple[WriteItemType, TensorWriteData]] = {}
    for key, box, hint in parts:
        if box is None:
            found.append(WriteItem(MetadataIndex(same_key(key)), WriteItemType.BYTE_IO))
            continue
        entry = entries[key]
        known = alike.get((id(entry), box))
        if known is None:
            whole = entry.kind == REPLICA and box.sizes == entry.size
            type_ = WriteItemType.TENSOR if whole else WriteItemType.SHARD
            offsets, sizes = map(torch.Size, box)
            chunk = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
            properties: Any = entry.properties
            data = TensorWriteData(chunk, properties, torch.Size(entry.size))
            known = alike[id(entry), box] = type_, data
        type_, data = known
        index = MetadataIndex(same_key(key), data.chunk.offsets, hint)
        found.append(WriteItem(index=index, type=type_, tensor_data=data))
    return found


class _Entries:
    """Makes entries."""

    def __init__(self) -> None:
        self._alike: dict[Any, Entry] = {}
        self._properties: dict[str, TensorProperties] = {}
        self._meshes: dict[int, tuple[int, ...]] = {}
        self._warned = False

    def of(self, key: str, value: Any) -> Entry | None:
        """Return the entry of a value, None if this rank has nothing of it."""
        kind = kind_of(value)
        if kind == BYTES:
            return self._alike.setdefault(BYTES, Entry(BYTES))
        if kind == REPLICA:
            shape = tuple(value.shape)
            likeness: Any = (value.dtype, shape, value.stride(), value.layout, value.requires_grad)
            found = self._alike.get(likeness)
            if found is None:
                whole = Box((0,) * len(shape), shape)
                found = Entry(REPLICA, self._properties_of(value), shape, (whole,))
                self._alike[likeness] = found
            return found
        if kind == OTHER:
            return self._other(key, value)
        likeness = (*_sharding(value), value.requires_grad, value._local_tensor.stride())
        found = self._alike.get(likeness)
        if found is None:
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
            properties = self._properties_of(value.to_local())
            found = self._alike[likeness] = Entry(SHARD, properties, tuple(value.shape), boxes)
        return found

    def _other(self, key: str, value: Any) -> Entry | None:
        """Return what torch says of a sharded tensor of another kind."""
        data = [item.tensor_data for item in _create_write_items(key, value)]
        if not data:
            return None
        if data[0] is None:
            return Entry(BYTES)
        chunks = [one.chunk for one in data if one is not None]
        boxes = tuple(Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks)
        return Entry(OTHER, self._same(data[0].properties), tuple(data[0].size), boxes)

    def _properties_of(self, tensor: torch.Tensor) -> TensorProperties:
        return self._same(TensorProperties.create_from_tensor(tensor))

    def _same(self, properties: TensorProperties) -> TensorProperties:
        """Return the same object for equal properties: it is sent once."""
        return self._properties.setdefault(repr(properties), properties)


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
        return [(Box((0,) * len(shape), shape), found.local.new_empty(shape))]
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
