"""From the rows of all ranks to who writes what, and to the checkpoint's metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from fastserial.distributed.boxes import Box, intersect
from fastserial.distributed.dcp.balance import Item, shares
from fastserial.distributed.dcp.local_rows import BYTES, OTHER, LocalRows, Row
from fastserial.distributed.tables import SHARED_FROM

__all__ = ["Part", "Told", "global_plan", "paths_of", "told_of"]

Path = tuple[str | int, ...]
_PARTS_EACH = 20  # a dimension with so many rows for each rank can be cut evenly enough


class Told(NamedTuple):
    """What a rank tells of its state.

    Attributes:
        local: its rows.
        paths: where in the nested state the keys are that are not at its top; None: it was not
            flattened.
    """

    local: LocalRows
    paths: dict[str, Path] | None


class Part(NamedTuple):
    """What a rank is to write: a part of one of its rows; a box of None: all of it."""

    row: int
    box: Box | None
    hint: int


@dataclass(slots=True)
class _Piece:
    """A row that some ranks have: which, and where in their rows it is."""

    row: Row
    properties: TensorProperties | None
    ranks: list[int]
    numbers: list[int]

    @property
    def nbytes(self) -> int:
        if self.properties is None:
            return 0
        return prod(self.row.sizes) * self.properties.dtype.itemsize


def told_of(local: LocalRows, mappings: Mapping[str, Path] | None) -> Told:
    """Return what a rank tells.

    Args:
        mappings: where in the nested state the keys are; None: it was not flattened.
    """
    if mappings is None:
        return Told(local, None)
    return Told(local, {key: path for key, path in mappings.items() if path != (key,)})


def paths_of(told: Sequence[Told]) -> dict[str, Path] | None:
    """Return where in the nested state the keys of all ranks are."""
    found: dict[str, Path] = {}
    for one in reversed(told):  # the first rank that has a key is right
        if one.paths is None:
            return None
        for row in one.local.rows:
            found[row.key] = one.paths.get(row.key) or (row.key,)
    return found


def global_plan(told: Sequence[Told], lowest: bool) -> tuple[list[list[Part]], Metadata]:
    """Return what each rank writes, and the metadata.

    Args:
        told: by each rank.
        lowest: what several ranks have is written by the first of them.

    Raises:
        ValueError: the pieces of a tensor do not make up the tensor.
    """
    pieces = _pieces(told)
    items = [_item(piece, lowest, len(told)) for piece in pieces]
    parts: list[list[Part]] = [[] for _ in told]
    entries: dict[str, Any] = {}
    for number, rank, first, stop in shares(items, len(told)):
        piece, rows = pieces[number], items[number].rows
        row, properties = piece.row, piece.properties
        own = piece.numbers[piece.ranks.index(rank)]
        if properties is None:
            entries[row.key] = BytesStorageMetadata()
            parts[rank].append(Part(own, None, 0))
            continue
        entry = entries.get(row.key)
        if entry is None:
            entry = TensorStorageMetadata(properties, torch.Size(row.size), [])
            entries[row.key] = entry
        box = Box(row.offsets, row.sizes)
        if (first, stop) != (0, rows):
            box = _cut(box, _dim(row.sizes, len(piece.ranks)), first, stop)
        whole = (first, stop) == (0, rows)
        parts[rank].append(Part(own, None if whole else box, len(entry.chunks)))
        offsets, sizes = torch.Size(box.offsets), torch.Size(box.sizes)
        entry.chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
    others = {piece.row.key for piece in pieces if piece.row.kind == OTHER}
    for key, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            _check(key, entry, len(told) > 1, key in others)
    return parts, Metadata(entries, planner_data=paths_of(told))


def _pieces(told: Sequence[Told]) -> list[_Piece]:
    found: dict[tuple[str, tuple[int, ...]], _Piece] = {}
    for rank, (local, _) in enumerate(told):
        for number, row in enumerate(local.rows):
            properties = local.properties[row.properties] if row.kind != BYTES else None
            piece = found.get((row.key, row.offsets))
            if piece is None:
                piece = _Piece(row, properties, [rank], [number])
                found[row.key, row.offsets] = piece
            elif _alike(piece, row, properties):
                piece.ranks.append(rank)
                piece.numbers.append(number)
    return list(found.values())


def _alike(piece: _Piece, row: Row, properties: TensorProperties | None) -> bool:
    """Return whether a rank's row is the one that the first rank has there: that one counts."""
    mine = piece.properties
    if mine is None or properties is None:
        return mine is properties
    return row[3:] == piece.row[3:] and mine.dtype == properties.dtype


def _item(piece: _Piece, lowest: bool, ranks: int) -> Item:
    nbytes, owners = piece.nbytes, tuple(piece.ranks)
    if lowest or piece.properties is None:
        return Item(nbytes, owners[:1])
    if len(owners) == 1 or nbytes < SHARED_FROM or piece.row.kind == OTHER:
        return Item(nbytes, owners)
    return Item(nbytes, owners, piece.row.sizes[_dim(piece.row.sizes, len(owners))])


def _dim(sizes: Sequence[int], ranks: int) -> int:
    """Return the dimension in which a tensor is cut: the first one that makes enough parts."""
    for dim, size in enumerate(sizes):
        if size >= _PARTS_EACH * ranks:
            return dim
    return max(range(len(sizes)), key=lambda dim: sizes[dim])


def _cut(box: Box, dim: int, first: int, stop: int) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim] += first
    sizes[dim] = stop - first
    return Box(tuple(offsets), tuple(sizes))


def _check(key: str, entry: TensorStorageMetadata, several: bool, pairwise: bool) -> None:
    """Raise if the chunks of a tensor do not make it up.

    Args:
        several: there are several ranks: else a part of a tensor may be all that is saved.
        pairwise: look for chunks that overlap; ours cannot.

    Raises:
        ValueError: they do not.
    """
    size = entry.size
    for chunk in entry.chunks:
        ends = zip(chunk.offsets, chunk.sizes, size, strict=True)
        if any(first < 0 or count < 0 or first + count > most for first, count, most in ends):
            raise ValueError(f"{key}: a part {chunk} lies outside of the tensor's {tuple(size)}")
    held = sum(prod(chunk.sizes) for chunk in entry.chunks)
    if several and len(size) and held != size.numel():
        raise ValueError(
            f"{key}: the ranks have {held} elements of a tensor {tuple(size)} of {size.numel()}"
        )
    if pairwise:
        boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        if any(intersect(a, b) is not None for a, b in combinations(boxes, 2)):
            raise ValueError(f"{key}: parts of the tensor overlap")
