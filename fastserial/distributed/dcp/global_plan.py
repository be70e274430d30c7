"""From the rows of all ranks to who writes what, and to the checkpoint's metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
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

from fastserial.distributed.dcp.local_rows import BYTES, OTHER, LocalRows, Part, Row
from fastserial.distributed.plan.balance import Item, Share, shares
from fastserial.distributed.sharding.boxes import Box, intersect
from fastserial.distributed.state.tables import SHARED_FROM

__all__ = ["Told", "global_plan", "paths_of", "told_of"]

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


def global_plan(
    told: Sequence[Told], lowest: bool, apart: Set[str] = frozenset()
) -> tuple[list[list[Part]], Metadata]:
    """Return what each rank writes, and the metadata.

    Args:
        told: by each rank.
        lowest: what several ranks have is written by the first of them.
        apart: plain tensors that differ between the ranks: the first rank's is saved, as a whole.

    Raises:
        ValueError: the pieces of a tensor do not make up the tensor, or a key has a value on some
            ranks and a tensor on others.
    """
    pieces = _pieces(told)
    _refuse_mixed(pieces)
    several = [number for number, piece in enumerate(pieces) if len(piece.ranks) > 1]
    load = [0] * len(told)  # what only one rank has it writes
    for piece in pieces:
        if len(piece.ranks) == 1:
            load[piece.ranks[0]] += piece.nbytes
    items = [_item(pieces[number], lowest, apart) for number in several]
    cuts: dict[int, list[Share]] = {}
    for share in shares(items, len(told), load):
        cuts.setdefault(several[share.item], []).append(share)
    made = _Made(len(told))
    for number, piece in enumerate(pieces):
        if number not in cuts:
            made.add(piece, 0, None)
            continue
        for share in cuts[number]:
            rows = items[share.item].rows
            whole = (share.first, share.stop) == (0, rows)
            own = piece.ranks.index(share.rank)
            made.add(piece, own, None if whole else _cut(piece, share.first, share.stop))
    _check(pieces, len(told) > 1)
    return made.parts, Metadata(made.entries, planner_data=paths_of(told))


class _Made:
    """What each rank writes, and the metadata's entries."""

    def __init__(self, ranks: int) -> None:
        self.parts: list[list[Part]] = [[] for _ in range(ranks)]
        self.entries: dict[str, Any] = {}
        self._chunks: dict[Any, ChunkStorageMetadata] = {}  # many tensors have the same
        self._sizes: dict[tuple[int, ...], torch.Size] = {}

    def add(self, piece: _Piece, own: int, box: Box | None) -> None:
        """Let a rank write a piece.

        Args:
            own: which of its ranks.
            box: a part of it; None: all of it.
        """
        row, properties = piece.row, piece.properties
        parts, number = self.parts[piece.ranks[own]], piece.numbers[own]
        if properties is None:
            self.entries[row.key] = BytesStorageMetadata()
            parts.append(Part(number, None, 0))
            return
        entry = self.entries.get(row.key)
        if entry is None:
            entry = TensorStorageMetadata(properties, self._size(row.size), [])
            self.entries[row.key] = entry
        parts.append(Part(number, box, len(entry.chunks)))
        place = (row.offsets, row.sizes) if box is None else box
        chunk = self._chunks.get(place)
        if chunk is None:
            offsets, sizes = map(torch.Size, place)
            chunk = self._chunks[place] = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
        entry.chunks.append(chunk)

    def _size(self, size: tuple[int, ...]) -> torch.Size:
        return self._sizes.setdefault(size, torch.Size(size))


def _pieces(told: Sequence[Told]) -> list[_Piece]:
    found: dict[tuple[str, tuple[int, ...] | None], _Piece] = {}
    for rank, (local, _) in enumerate(told):
        for number, row in enumerate(local.rows):
            properties = local.properties[row.properties] if row.kind != BYTES else None
            place = row.key, None if properties is None else row.offsets
            piece = found.get(place)
            if piece is None:
                found[place] = _Piece(row, properties, [rank], [number])
            elif _alike(piece, row, properties):
                piece.ranks.append(rank)
                piece.numbers.append(number)
    return list(found.values())


def _refuse_mixed(pieces: Sequence[_Piece]) -> None:
    """Raise if a key has a value on some ranks and a tensor on others: as stock does."""
    values = {piece.row.key: piece for piece in pieces if piece.properties is None}
    for piece in pieces if values else ():
        value = values.get(piece.row.key)
        if value is not None and piece.properties is not None:
            raise ValueError(
                f"{piece.row.key}: a value on ranks {value.ranks}, a tensor on ranks {piece.ranks}:"
                " give one of them another key"
            )


def _alike(piece: _Piece, row: Row, properties: TensorProperties | None) -> bool:
    """Return whether a rank's row is the one that the first rank has there: that one counts."""
    mine = piece.properties
    if mine is None or properties is None:
        return mine is properties
    return row[3:] == piece.row[3:] and mine.dtype == properties.dtype


def _item(piece: _Piece, lowest: bool, apart: Set[str]) -> Item:
    nbytes, owners = piece.nbytes, tuple(piece.ranks)
    if lowest or piece.properties is None or piece.row.key in apart:
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


def _cut(piece: _Piece, first: int, stop: int) -> Box:
    """Return rows [first, stop) of a piece."""
    dim = _dim(piece.row.sizes, len(piece.ranks))
    offsets, sizes = list(piece.row.offsets), list(piece.row.sizes)
    offsets[dim] += first
    sizes[dim] = stop - first
    return Box(tuple(offsets), tuple(sizes))


def _check(pieces: Sequence[_Piece], several: bool) -> None:
    """Raise if the pieces of a tensor do not make it up.

    Args:
        several: there are several ranks: else a part of a tensor may be all that is saved.

    Raises:
        ValueError: they do not.
    """
    held: dict[str, int] = {}
    wholes: dict[str, tuple[int, ...]] = {}
    for piece in pieces:
        if piece.properties is None:
            continue
        row = piece.row
        size = wholes.setdefault(row.key, row.size)
        alike = len(row.offsets) == len(row.sizes) == len(size)
        if not alike or any(map(_outside, row.offsets, row.sizes, size)):
            box = Box(row.offsets, row.sizes)
            raise ValueError(f"{row.key}: a part {box} lies outside of the tensor's {size}")
        held[row.key] = held.get(row.key, 0) + prod(row.sizes)
    for key, size in wholes.items():
        if several and size and held[key] != prod(size):
            raise ValueError(
                f"{key}: the ranks have {held[key]} elements of a tensor {size} of {prod(size)}"
            )
    boxes: dict[str, list[Box]] = {
        piece.row.key: []
        for piece in pieces
        if piece.row.kind == OTHER  # ours cannot overlap
    }
    for piece in pieces if boxes else ():
        if piece.row.key in boxes:
            boxes[piece.row.key].append(Box(piece.row.offsets, piece.row.sizes))
    for key, some in boxes.items():
        if any(intersect(a, b) is not None for a, b in combinations(some, 2)):
            raise ValueError(f"{key}: parts of the tensor overlap")


def _outside(first: int, count: int, most: int) -> bool:
    return first < 0 or count < 0 or first + count > most
