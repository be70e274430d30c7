"""From what all ranks have to who writes what, and to the checkpoint's metadata."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import _create_write_items

from fastserial.distributed.plan.balance import Assignment, Workload, assign
from fastserial.distributed.sharding.boxes import Box, intersect
from fastserial.distributed.sharding.pieces import as_dtensor, holding
from fastserial.distributed.state.tables import SHARED_FROM
from fastserial.errors import UnknownPlacementError

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


Path = tuple[str | int, ...]
_PARTS_EACH = 20  # a dimension with so many rows for each rank can be cut evenly enough


class RankEntries(NamedTuple):
    """What a rank has of the state.

    Attributes:
        entries: by their keys.
        paths: where in the nested state the keys are that are not at its top; None: it was not
            flattened.
    """

    entries: dict[str, StateEntry]
    paths: dict[str, Path] | None

    @classmethod
    def of(cls, entries: dict[str, StateEntry], mappings: Mapping[str, Path] | None) -> RankEntries:
        """Make one from the paths of all keys; None: the state was not flattened."""
        if mappings is None:
            return cls(entries, None)
        return cls(entries, {key: path for key, path in mappings.items() if path != (key,)})


@dataclass(slots=True)
class _HeldBox:
    """A box of a tensor, or bytes, and the ranks that have it."""

    key: str
    entry: StateEntry
    box: Box | None
    ranks: list[int]

    @property
    def nbytes(self) -> int:
        properties = self.entry.properties
        if self.box is None or properties is None:
            return 0
        return self.box.numel * int(properties.dtype.itemsize)


def _paths_of(ranks: Sequence[RankEntries]) -> dict[str, Path] | None:
    """Return where in the nested state the keys of all ranks are."""
    found: dict[str, Path] = {}
    for one in reversed(ranks):  # the first rank that has a key is right
        if one.paths is None:
            return None
        for key in one.entries:
            found[key] = one.paths.get(key) or (key,)
    return found


def global_plan(
    ranks: Sequence[RankEntries], lowest: bool, apart: Set[str] = frozenset()
) -> tuple[list[list[WritePart]], Metadata]:
    """Return what each rank writes, and the metadata.

    Args:
        ranks: what each rank has.
        lowest: what several ranks have is written by the first of them.
        apart: plain tensors that differ between the ranks: the first rank's is saved, as a whole.

    Raises:
        ValueError: the boxes of a tensor do not make up the tensor, or a key has a value on some
            ranks and a tensor on others.
    """
    held = _held_boxes(ranks)
    _refuse_mixed(held)
    load = [0] * len(ranks)  # bytes that only one rank has
    for one in held:
        if len(one.ranks) == 1:
            load[one.ranks[0]] += one.nbytes
    several = [number for number, one in enumerate(held) if len(one.ranks) > 1]
    items = [_item(held[number], lowest, apart) for number in several]
    cuts: dict[int, list[Assignment]] = {}
    for share in assign(items, len(ranks), load):
        cuts.setdefault(several[share.item], []).append(share)
    parts: list[list[WritePart]] = [[] for _ in ranks]
    entries: dict[str, Any] = {}
    chunks: dict[Box, ChunkStorageMetadata] = {}  # many tensors have the same
    for number, one in enumerate(held):
        for rank, box in _writers(one, cuts.get(number), items):
            hint = _enter(entries, one, box, chunks)
            parts[rank].append(WritePart(one.key, box, hint))
    _check(held, len(ranks) > 1)
    return parts, Metadata(entries, planner_data=_paths_of(ranks))


def _writers(
    held: _HeldBox, cuts: Sequence[Assignment] | None, items: Sequence[Workload]
) -> Iterator[tuple[int, Box | None]]:
    """Yield who writes which boxes of what some ranks have."""
    if cuts is None:
        yield held.ranks[0], held.box
        return
    for item, rank, first, stop in cuts:
        whole = (first, stop) == (0, items[item].rows)
        yield rank, held.box if whole else _cut(held, first, stop)


def _enter(
    entries: dict[str, Any],
    held: _HeldBox,
    box: Box | None,
    chunks: dict[Box, ChunkStorageMetadata],
) -> int:
    """Enter what is written in the metadata; return which chunk of its tensor it is."""
    properties = held.entry.properties
    if box is None or properties is None:
        entries[held.key] = BytesStorageMetadata()
        return 0
    entry = entries.get(held.key)
    if entry is None:
        size = torch.Size(held.entry.size)
        entry = entries[held.key] = TensorStorageMetadata(properties, size, [])
    entry.chunks.append(chunks.get(box) or chunks.setdefault(box, chunk_of(box)))
    return len(entry.chunks) - 1


def _held_boxes(ranks: Sequence[RankEntries]) -> list[_HeldBox]:
    found: dict[tuple[str, tuple[int, ...] | None], _HeldBox] = {}
    for rank, one in enumerate(ranks):
        for key, entry in one.entries.items():
            for box in entry.boxes:
                place = key, None if box is None else box.offsets
                held = found.get(place)
                if held is None:
                    found[place] = _HeldBox(key, entry, box, [rank])
                elif _is_same(held, entry, box):
                    held.ranks.append(rank)
    return list(found.values())


def _is_same(held: _HeldBox, entry: StateEntry, box: Box | None) -> bool:
    """Return whether a rank has there what the first rank has: that one counts."""
    mine, other = held.entry.properties, entry.properties
    if mine is None or other is None:
        return mine is other
    return (held.entry.size, held.box, mine.dtype) == (entry.size, box, other.dtype)


def _refuse_mixed(held: Sequence[_HeldBox]) -> None:
    """Raise if a key has a value on some ranks and a tensor on others: as stock does."""
    values = {one.key: one for one in held if one.box is None}
    for one in held if values else ():
        value = values.get(one.key)
        if value is not None and one.box is not None:
            raise ValueError(
                f"{one.key}: a value on ranks {value.ranks}, a tensor on ranks {one.ranks}:"
                " give one of them another key"
            )


def _item(held: _HeldBox, lowest: bool, apart: Set[str]) -> Workload:
    nbytes, owners, box = held.nbytes, tuple(held.ranks), held.box
    if lowest or box is None or held.key in apart:
        return Workload(nbytes, owners[:1])
    if len(owners) == 1 or nbytes < SHARED_FROM or held.entry.kind == OTHER:
        return Workload(nbytes, owners)
    return Workload(nbytes, owners, box.sizes[_dim(box.sizes, len(owners))])


def _dim(sizes: Sequence[int], ranks: int) -> int:
    """Return the dimension in which a tensor is cut: the first one that makes enough parts."""
    for dim, size in enumerate(sizes):
        if size >= _PARTS_EACH * ranks:
            return dim
    return max(range(len(sizes)), key=lambda dim: sizes[dim])


def _cut(held: _HeldBox, first: int, stop: int) -> Box | None:
    """Return rows [first, stop) of a box, in the dimension in which it is cut."""
    if held.box is None:
        return None
    dim = _dim(held.box.sizes, len(held.ranks))
    offsets, sizes = map(list, held.box)
    offsets[dim] += first
    sizes[dim] = stop - first
    return Box(tuple(offsets), tuple(sizes))


def _check(held: Sequence[_HeldBox], several: bool) -> None:
    """Raise if the boxes of a tensor do not make it up.

    Args:
        several: there are several ranks: else a part of a tensor may be all that is saved.

    Raises:
        ValueError: they do not.
    """
    boxes: dict[str, list[Box]] = {}
    entries: dict[str, StateEntry] = {}  # of the first rank that has the tensor
    others: set[str] = set()
    for one in held:
        key, box = one.key, one.box
        if box is None:
            continue
        size = entries.setdefault(key, one.entry).size
        if len(box.offsets) != len(size) or not whole_box(size).contains(box):
            raise ValueError(f"{key}: a part {box} lies outside of the tensor's {size}")
        boxes.setdefault(key, []).append(box)
        if one.entry.kind == OTHER:
            others.add(key)
    for key, entry in entries.items():
        count, whole = sum(box.numel for box in boxes[key]), prod(entry.size)
        if several and entry.size and count != whole:
            raise ValueError(
                f"{key}: the ranks have {count} elements of a tensor {entry.size} of {whole}"
            )
    for key in others:
        if any(intersect(a, b) is not None for a, b in combinations(boxes[key], 2)):
            raise ValueError(f"{key}: parts of the tensor overlap")
