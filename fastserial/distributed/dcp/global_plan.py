"""From what all ranks have to who writes what, and to the checkpoint's metadata."""

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

from fastserial.distributed.dcp.entries import OTHER, Entry, Part
from fastserial.distributed.plan.balance import Item, Share, shares
from fastserial.distributed.sharding.boxes import Box, intersect
from fastserial.distributed.state.tables import SHARED_FROM

__all__ = ["Told", "global_plan", "paths_of", "told_of"]

Path = tuple[str | int, ...]
_PARTS_EACH = 20  # a dimension with so many rows for each rank can be cut evenly enough


class Told(NamedTuple):
    """What a rank tells of its state.

    Attributes:
        entries: by their keys.
        paths: where in the nested state the keys are that are not at its top; None: it was not
            flattened.
    """

    entries: dict[str, Entry]
    paths: dict[str, Path] | None


@dataclass(slots=True)
class _Piece:
    """What some ranks have of an entry: a box of a tensor, or bytes."""

    key: str
    entry: Entry
    box: Box | None
    ranks: list[int]

    @property
    def nbytes(self) -> int:
        properties = self.entry.properties
        return 0 if self.box is None or properties is None else _nbytes(self.box, properties)


def _nbytes(box: Box, properties: TensorProperties) -> int:
    return box.numel * int(properties.dtype.itemsize)


def told_of(entries: dict[str, Entry], mappings: Mapping[str, Path] | None) -> Told:
    """Return what a rank tells.

    Args:
        mappings: where in the nested state the keys are; None: it was not flattened.
    """
    if mappings is None:
        return Told(entries, None)
    return Told(entries, {key: path for key, path in mappings.items() if path != (key,)})


def paths_of(told: Sequence[Told]) -> dict[str, Path] | None:
    """Return where in the nested state the keys of all ranks are."""
    found: dict[str, Path] = {}
    for one in reversed(told):  # the first rank that has a key is right
        if one.paths is None:
            return None
        for key in one.entries:
            found[key] = one.paths.get(key) or (key,)
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
            made.add(piece, piece.ranks[0], piece.box)
            continue
        for share in cuts[number]:
            whole = (share.first, share.stop) == (0, items[share.item].rows)
            box = piece.box if whole else _cut(piece, share.first, share.stop)
            made.add(piece, share.rank, box)
    _check(pieces, len(told) > 1)
    return made.parts, Metadata(made.entries, planner_data=paths_of(told))


class _Made:
    """What each rank writes, and the metadata's entries."""

    def __init__(self, ranks: int) -> None:
        self.parts: list[list[Part]] = [[] for _ in range(ranks)]
        self.entries: dict[str, Any] = {}
        self._chunks: dict[Any, ChunkStorageMetadata] = {}  # many tensors have the same
        self._sizes: dict[tuple[int, ...], torch.Size] = {}

    def add(self, piece: _Piece, rank: int, box: Box | None) -> None:
        """Let a rank write a box of a piece."""
        key, properties, size = piece.key, piece.entry.properties, piece.entry.size
        if box is None or properties is None:
            self.entries[key] = BytesStorageMetadata()
            self.parts[rank].append(Part(key, None, 0))
            return
        entry = self.entries.get(key)
        if entry is None:
            entry = self.entries[key] = TensorStorageMetadata(properties, self._size(size), [])
        self.parts[rank].append(Part(key, box, len(entry.chunks)))
        chunk = self._chunks.get(box)
        if chunk is None:
            offsets, sizes = map(torch.Size, box)
            chunk = self._chunks[box] = ChunkStorageMetadata(offsets=offsets, sizes=sizes)
        entry.chunks.append(chunk)

    def _size(self, size: tuple[int, ...]) -> torch.Size:
        return self._sizes.setdefault(size, torch.Size(size))


def _pieces(told: Sequence[Told]) -> list[_Piece]:
    found: dict[tuple[str, tuple[int, ...] | None], _Piece] = {}
    for rank, one in enumerate(told):
        for key, entry in one.entries.items():
            for box in entry.boxes:
                place = key, None if box is None else box.offsets
                piece = found.get(place)
                if piece is None:
                    found[place] = _Piece(key, entry, box, [rank])
                elif _alike(piece, entry, box):
                    piece.ranks.append(rank)
    return list(found.values())


def _refuse_mixed(pieces: Sequence[_Piece]) -> None:
    """Raise if a key has a value on some ranks and a tensor on others: as stock does."""
    values = {piece.key: piece for piece in pieces if piece.box is None}
    for piece in pieces if values else ():
        value = values.get(piece.key)
        if value is not None and piece.box is not None:
            raise ValueError(
                f"{piece.key}: a value on ranks {value.ranks}, a tensor on ranks {piece.ranks}:"
                " give one of them another key"
            )


def _alike(piece: _Piece, entry: Entry, box: Box | None) -> bool:
    """Return whether a rank has there what the first rank has: that one counts."""
    mine, other = piece.entry.properties, entry.properties
    if mine is None or other is None:
        return mine is other
    return (piece.entry.size, piece.box, mine.dtype) == (entry.size, box, other.dtype)


def _item(piece: _Piece, lowest: bool, apart: Set[str]) -> Item:
    nbytes, owners, box = piece.nbytes, tuple(piece.ranks), piece.box
    if lowest or box is None or piece.key in apart:
        return Item(nbytes, owners[:1])
    if len(owners) == 1 or nbytes < SHARED_FROM or piece.entry.kind == OTHER:
        return Item(nbytes, owners)
    return Item(nbytes, owners, box.sizes[_dim(box.sizes, len(owners))])


def _dim(sizes: Sequence[int], ranks: int) -> int:
    """Return the dimension in which a tensor is cut: the first one that makes enough parts."""
    for dim, size in enumerate(sizes):
        if size >= _PARTS_EACH * ranks:
            return dim
    return max(range(len(sizes)), key=lambda dim: sizes[dim])


def _cut(piece: _Piece, first: int, stop: int) -> Box | None:
    """Return rows [first, stop) of a piece."""
    if piece.box is None:
        return None
    dim = _dim(piece.box.sizes, len(piece.ranks))
    offsets, sizes = map(list, piece.box)
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
    boxes: dict[str, list[Box]] = {}
    for piece in pieces:
        key, box = piece.key, piece.box
        if box is None:
            continue
        size = wholes.setdefault(key, piece.entry.size)
        alike = len(box.offsets) == len(box.sizes) == len(size)
        if not alike or any(map(_outside, box.offsets, box.sizes, size)):
            raise ValueError(f"{key}: a part {box} lies outside of the tensor's {size}")
        held[key] = held.get(key, 0) + box.numel
        boxes.setdefault(key, []).append(box)
    for key, size in wholes.items():
        if several and size and held[key] != prod(size):
            raise ValueError(
                f"{key}: the ranks have {held[key]} elements of a tensor {size} of {prod(size)}"
            )
    for key in {piece.key for piece in pieces if piece.entry.kind == OTHER and piece.box}:
        if any(intersect(a, b) is not None for a, b in combinations(boxes[key], 2)):
            raise ValueError(f"{key}: parts of the tensor overlap")


def _outside(first: int, count: int, most: int) -> bool:
    return first < 0 or count < 0 or first + count > most
