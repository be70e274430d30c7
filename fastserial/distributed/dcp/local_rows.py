"""What a rank has of a state: a row for each piece, of plain values, so that many are sent fast."""

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

__all__ = ["BYTES", "OTHER", "REPLICA", "SHARD", "LocalRows", "Part", "Row", "kind_of", "parts_of"]

BYTES, SHARD, REPLICA, OTHER = range(4)  # kinds of rows; REPLICA: a plain tensor
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_GLOBAL = "global_shape"  # torch 2.15: a plain tensor that has it is a part of another one


class Row(NamedTuple):
    """A piece of a state.

    Attributes:
        key: in the flattened state.
        kind: `BYTES`, or of which kind of tensor it is.
        properties: number of its `TensorProperties`.
        size: of the whole tensor.
        offsets, sizes: of the piece.
    """

    key: str
    kind: int
    properties: int = -1
    size: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


class Part(NamedTuple):
    """What a rank is to write: a part of one of its rows; a box of None: all of it."""

    row: int
    box: Box | None
    hint: int


class LocalRows(NamedTuple):
    """All of a rank's rows, and what several of them share."""

    rows: list[Row]
    properties: list[TensorProperties]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle columns: a third of the time that so many rows take."""
        return _from_columns, (list(zip(*self.rows, strict=True)), self.properties)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> LocalRows:
        """Return the rows of a flattened state.

        Raises:
            LoadMismatchError: a placement cannot be saved: `Partial`, say.
        """
        return _Rows().of(state)

    def replicas(self) -> list[str]:
        """Return the keys of the plain tensors that are large enough to be cut."""
        return [
            row.key
            for row in self.rows
            if row.kind == REPLICA
            and prod(row.sizes) * self.properties[row.properties].dtype.itemsize >= SHARED_FROM
        ]

    def items(self, parts: Iterable[Part]) -> list[WriteItem]:
        """Return what stock calls rows or parts of them."""
        found: list[WriteItem] = []
        alike: dict[Any, tuple[WriteItemType, TensorWriteData]] = {}
        for number, box, hint in parts:
            key, *what = row = self.rows[number]
            if row.kind == BYTES:
                found.append(WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO))
                continue
            likeness = (*what, box)
            known = alike.get(likeness)
            if known is None:
                known = alike[likeness] = self._described(row, box)
            type_, data = known
            index = MetadataIndex(key, data.chunk.offsets, hint)
            found.append(WriteItem(index=index, type=type_, tensor_data=data))
        return found

    def _described(self, row: Row, box: Box | None) -> tuple[WriteItemType, TensorWriteData]:
        """Return what stock says of a part of a row, or of all of it."""
        offsets, sizes = map(torch.Size, box if box is not None else (row.offsets, row.sizes))
        whole = row.kind == REPLICA and sizes == row.size
        return (
            WriteItemType.TENSOR if whole else WriteItemType.SHARD,
            TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                properties=self.properties[row.properties],
                size=torch.Size(row.size),
            ),
        )


def _from_columns(columns: list[Any], properties: list[TensorProperties]) -> LocalRows:
    return LocalRows(list(map(Row._make, zip(*columns, strict=True))), properties)


class _Rows:
    """Makes rows."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._properties: list[TensorProperties] = []
        self._numbers: dict[str, int] = {}
        # Of tensors that are alike everything but the key is the same.
        self._alike: dict[Any, list[tuple[Any, ...]]] = {}
        self._meshes: dict[int, tuple[int, ...]] = {}
        self._warned = False

    def of(self, state: Mapping[str, Any]) -> LocalRows:
        for key, value in state.items():
            self._add(key, value)
        return LocalRows(self._rows, self._properties)

    def _add(self, key: str, value: Any) -> None:
        kind = kind_of(value)
        if kind == BYTES:
            self._rows.append(Row(key, BYTES))
        elif kind == REPLICA:
            shape = tuple(value.shape)
            likeness: Any = (value.dtype, shape, value.stride(), value.layout, value.requires_grad)
            found = self._alike.get(likeness)
            if found is None:
                number = self._number(TensorProperties.create_from_tensor(value))
                found = [(REPLICA, number, shape, (0,) * len(shape), shape)]
                self._alike[likeness] = found
            self._rows.append(Row(key, *found[0]))
        elif kind == SHARD:
            local = value._local_tensor
            likeness = (*_sharding(value), value.requires_grad, local.stride())
            found = self._alike.get(likeness)
            if found is None:
                if value.device_mesh.get_coordinate() is None:
                    return
                try:
                    boxes = [box for box, _ in parts_of(value, key, self._meshes)]
                except UnknownPlacementError as error:
                    self._warn(error)
                    self._add_other(key, value)
                    return
                number = self._number(TensorProperties.create_from_tensor(value.to_local()))
                shape = tuple(value.shape)
                found = self._alike[likeness] = [(SHARD, number, shape, *box) for box in boxes]
            self._rows += [Row(key, *what) for what in found]
        else:
            self._add_other(key, value)

    def _warn(self, error: UnknownPlacementError) -> None:
        """Say once of all tensors that torch plans how they are saved."""
        if not self._warned:
            text = f"{error}. It is saved as DefaultSavePlanner would, as are others like it"
            warnings.warn(text, UserWarning, stacklevel=2)
        self._warned = True

    def _add_other(self, key: str, value: Any) -> None:
        """Add what torch says of a sharded tensor of another kind."""
        for item in _create_write_items(key, value):
            data = item.tensor_data
            if data is None:
                self._rows.append(Row(key, BYTES))
                continue
            number = self._number(data.properties)
            chunk = data.chunk
            box = (tuple(chunk.offsets), tuple(chunk.sizes))
            self._rows.append(Row(key, OTHER, number, tuple(data.size), *box))

    def _number(self, properties: TensorProperties) -> int:
        text = repr(properties)
        number = self._numbers.get(text)
        if number is None:
            number = self._numbers[text] = len(self._properties)
            self._properties.append(properties)
        return number


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
