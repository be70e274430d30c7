"""From what all ranks have to who writes what, and to the checkpoint's metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from fastserial.distributed.dcp.entries import OTHER, StateEntry, WritePart, chunk_of
from fastserial.distributed.plan.balance import Assignment, Workload, assign
from fastserial.distributed.sharding.boxes import Box, intersect
from fastserial.distributed.state.tables import SHARED_FROM

__all__ = ["RankEntries", "global_plan"]

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
        fits = len(box.offsets) == len(box.sizes) == len(size)
        if not fits or any(map(_is_outside, box.offsets, box.sizes, size)):
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


def _is_outside(first: int, count: int, most: int) -> bool:
    return first < 0 or count < 0 or first + count > most
