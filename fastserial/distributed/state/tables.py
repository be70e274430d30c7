"""What a state consists of, on this rank: its tensors as sources of bytes, and a digest.

A source is what becomes one record of the file: a sharded tensor as a whole, or the storage of
plain tensors, which may be views of it. Ranks whose tables are alike know each other's sources by
number.
"""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fastserial.distributed.ranks.copies import Copy
from fastserial.distributed.sharding.boxes import Box
from fastserial.distributed.sharding.flat_shard import FlatShard
from fastserial.distributed.sharding.pieces import (
    Flat,
    Mesh,
    Specs,
    TensorSpec,
    as_dtensor,
    local_of,
    oddity,
    views,
)
from fastserial.distributed.state.joined import Joined
from fastserial.errors import ConfigError
from fastserial.memory.storages import synchronize

__all__ = [
    "SHARED_FROM",
    "Source",
    "Sources",
    "Table",
    "bytes_of",
    "difference",
    "is_plain",
    "synchronize_devices",
    "table_of",
]

# Bytes of a storage from which on every rank writes a part of it. Below it counts what rank 0 has:
# buffers of a data-parallel model may differ, and the file is what rank 0 would have saved.
SHARED_FROM = 1024 * 1024
_REMEDY = ' (merge="union" of distributed.save and save_async saves those of all ranks)'
_PLAIN = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}


@dataclass(slots=True)
class Source:
    """Bytes of one record-to-be.

    Attributes:
        key: the name of the first leaf that has it.
        spec: the whole; a storage counts as bytes.
        leaf: that first leaf.
        rank: this rank.
    """

    key: str
    spec: TensorSpec
    leaf: Any
    rank: int
    _parts: list[tuple[Box, torch.Tensor]] | None = None

    @property
    def parts(self) -> list[tuple[Box, torch.Tensor]]:
        """What this rank holds of it, made when it is asked for first.

        Raises:
            LoadMismatchError: a shard is not what its placements say.
        """
        if self._parts is None:
            leaf = self.leaf.leaf if isinstance(self.leaf, Joined) else self.leaf
            if leaf is None:
                self._parts = []
            elif isinstance(leaf, FlatShard) or as_dtensor(leaf) is not None:
                self._parts = views(self.spec, self.rank, local_of(leaf, self.key), self.key)
            else:
                memory = bytes_of(leaf.untyped_storage())
                self._parts = [(Box((0,), (memory.numel(),)), memory)] if memory.numel() else []
        return self._parts


class Sources:
    """The sources of a plan with this save's tensors; each is made when it is asked for first."""

    def __init__(
        self,
        values: Sequence[Any],
        keys: Sequence[str],
        specs: Sequence[TensorSpec],
        firsts: Sequence[int],
        rank: int,
    ) -> None:
        """Make none.

        Args:
            values: the tensors.
            keys, specs, firsts: of each source; see `Table`.
            rank: this rank.
        """
        self._values, self._keys = values, keys
        self._specs, self._firsts, self._rank = specs, firsts, rank
        self._made: dict[int, Source] = {}

    def release(self) -> None:
        """Let go of the tensors; keys and specs stay."""
        self._values = [None] * len(self._values)
        self._made.clear()

    def __getitem__(self, number: int) -> Source:
        source = self._made.get(number)
        if source is None:
            leaf = self._values[self._firsts[number]]
            source = Source(self._keys[number], self._specs[number], leaf, self._rank)
            self._made[number] = source
        return source


@dataclass(slots=True)
class Table:
    """The tensors of a state on this rank.

    Attributes:
        leaves: with their names.
        rank: this rank.
        sources: in the order in which the state has them.
        rows: of each leaf, what has to be the same on all ranks, as plain values.
        by_leaf: number of the source of a sharded leaf, by its `id`.
        by_storage: number of the source of a plain storage, by its `_cdata`.
        misfits: sources whose shards were made from left to right (`Mesh.right_first`).
        meshes, grids: each mesh that is in the rows, and its ranks. Ranks may be on different
            meshes of one shape: then each mesh has the whole tensor.
        joined: number of the source of a merged tensor.
        firsts: of each source, its leaf's place among the leaves.
        of_leaves: number of the source of each leaf; -1: no load could fill it.
        copies: the plain tensors that several ranks have, and that should be equal.
        odd: the tensors that no load could fill, and why.
    """

    leaves: Sequence[tuple[str, Any]] = ()
    rank: int = 0
    sources: list[Source] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    by_leaf: dict[int, int] = field(default_factory=dict)
    by_storage: dict[int, int] = field(default_factory=dict)
    misfits: list[int] = field(default_factory=list)
    grids: list[tuple[tuple[int, ...], ...]] = field(default_factory=list)
    meshes: dict[Mesh, int] = field(default_factory=dict)
    joined: dict[Any, int] = field(default_factory=dict)
    firsts: list[int] = field(default_factory=list)
    of_leaves: list[int] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)

    def digest(self) -> bytes:
        """Return what is the same on all ranks if and only if their tables are alike."""
        return hashlib.sha256(marshal.dumps(self.rows, 2)).digest()

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return what this rank holds of each FlatShard: source, first element, end."""
        return [
            (number, first, stop)
            for number, source in enumerate(self.sources)
            if isinstance(source.spec.held, Flat) and _is_flat(source.leaf)
            for _, first, stop in source.spec.held.ranges
        ]

    def complete(
        self,
        ranges: Mapping[int, list[tuple[int, int, int]]],
        misfits: set[int],
        grids: Sequence[tuple[tuple[int, ...], ...]],
    ) -> None:
        """Enter what the other ranks told.

        Args:
            ranges: what the ranks hold of each FlatShard: rank, first element, end.
            misfits: see the attribute; of any rank.
            grids: of each mesh, those of all ranks.

        Raises:
            ConfigError: the FlatShards of a tensor do not make it up.
        """
        completed: dict[tuple[int, bool], TensorSpec] = {}
        held: dict[Mesh, Mesh] = {}
        for number, source in enumerate(self.sources):
            spec = source.spec
            if _is_flat(source.leaf):
                found = tuple(sorted(map(tuple, ranges.get(number, ()))))
                _refuse_gaps(source.key, spec.numel, found)
                source.spec = replace(spec, held=Flat(found))  # type: ignore[arg-type]
            elif isinstance(spec.held, Mesh):
                right_first = number not in misfits
                whole = completed.get((id(spec), right_first))
                if whole is None:
                    mesh = self.meshes[spec.held._replace(right_first=True)]
                    new = spec.held._replace(grids=grids[mesh], right_first=right_first)
                    whole = replace(spec, held=held.setdefault(new, new))
                    completed[id(spec), right_first] = whole
                source.spec = whole


def _refuse_gaps(key: str, numel: int, ranges: Iterable[tuple[int, ...]]) -> None:
    reached = 0
    for _, first, stop in sorted(ranges, key=lambda found: found[1]):
        if first > reached:
            numel = first
            break
        reached = max(reached, stop)
    if reached < numel:
        raise ConfigError(
            f"{key}: no rank has elements {reached} to {numel - 1} of it: the FlatShards of all "
            "ranks must make up the tensor"
        )


def difference(mine: list[tuple[Any, ...]], other: list[tuple[Any, ...]]) -> str | None:
    """Return in words how the rows of another rank differ from rank 0's, None if they do not."""
    if mine == other:
        return None
    ours, theirs = {row[0]: row for row in mine}, {row[0]: row for row in other}
    for key in ours.keys() ^ theirs.keys():
        has, lacks = ("rank 0 has", "it has") if key in ours else ("it has", "rank 0 has")
        return f"{has} the tensor {key!r}, which {lacks} not" + _REMEDY
    for key, row in ours.items():
        there = theirs[key]
        if row[2:4] != there[2:4]:
            return f"its {key!r} is {_words(there)}, that of rank 0 {_words(row)}"
        if row[4:] != there[4:]:
            return f"its {key!r} is placed otherwise than that of rank 0"
    return "its tensors are in another order, or share their memory otherwise, than those of rank 0"


def _words(row: tuple[Any, ...]) -> str:
    return f"{row[3]} of shape {row[2]}"


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage as a one-dimensional tensor of bytes."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage)


def table_of(
    found: Sequence[tuple[str, Any]],
    rank: int,
    ranks: Mapping[int, int],
    buffers: Set[int] = frozenset(),
) -> Table:
    """Return the table of a state.

    Args:
        found: its tensors (`walk.leaves`).
        rank: this rank in the group.
        ranks: the group's rank of each global rank.
        buffers: identities of the storages of modules' buffers, which count as rank 0 has them.

    Raises:
        LoadMismatchError: a tensor has a placement that cannot be in a file.
    """
    table = Table(found, rank)
    specs = Specs(rank, ranks)
    how: dict[int, tuple[Any, ...]] = {}
    for index, (key, leaf) in enumerate(found):
        rows = len(table.rows)
        if isinstance(leaf, Joined):
            _add_joined(table, key, leaf, specs, index, buffers)
        elif not is_plain(leaf):
            _add_sharded(table, key, leaf, specs, how)
        elif (odd := oddity(leaf)) is not None:
            table.odd.append(f"{key}: {odd}")
        else:
            _add_plain(table, key, leaf, index, buffers)
        if len(table.firsts) < len(table.sources):
            table.firsts.append(index)
        table.of_leaves.append(table.rows[-1][1] if len(table.rows) > rows else -1)
    return table


def has_devices(found: Sequence[tuple[str, Any]]) -> bool:
    """Return whether tensors are on devices."""
    return any(
        leaf.tensor.device.type != "cpu" if isinstance(leaf, FlatShard) else not leaf.is_cpu
        for leaf in (one.leaf if isinstance(one, Joined) else one for _, one in found)
        if leaf is not None
    )


def synchronize_devices(found: Sequence[tuple[str, Any]]) -> None:
    """Wait for the work queued on the devices of tensors: other threads will copy them."""
    away: dict[torch.device, torch.UntypedStorage] = {}
    for key, leaf in found:
        leaf = leaf.leaf if isinstance(leaf, Joined) else leaf
        if leaf is None:
            continue
        device = leaf.tensor.device if isinstance(leaf, FlatShard) else leaf.device
        if device.type not in ("cpu", "meta") and device not in away:
            away[device] = local_of(leaf, key).untyped_storage()
    synchronize(list(away.values()))


def _add_sharded(
    table: Table, key: str, leaf: Any, specs: Specs, how: dict[int, tuple[Any, ...]]
) -> None:
    """Add a DTensor or a FlatShard.

    Args:
        how: the end of the rows of each spec, by its `id`.
    """
    number = table.by_leaf.get(id(leaf))
    if number is None:
        spec = specs.of(leaf, key)
        number = table.by_leaf[id(leaf)] = len(table.sources)
        table.sources.append(Source(key, spec, leaf, table.rank))
        if id(spec) not in how or (isinstance(spec.held, Mesh) and not spec.held.right_first):
            index = _note_mesh(table, number, spec)
            placed: Any = None
            if isinstance(spec.held, Mesh):
                placed = (index, spec.held.shape, tuple(map(tuple, spec.held.splits)))
            how[id(spec)] = (spec.shape, str(spec.dtype), placed)
    table.rows.append((key, number, *how[id(table.sources[number].spec)]))


def is_plain(leaf: object) -> bool:
    """Return whether a leaf is a tensor that this rank has as a whole."""
    return not isinstance(leaf, FlatShard | Joined) and as_dtensor(leaf) is None


def _is_flat(leaf: object) -> bool:
    return isinstance(leaf, FlatShard) or (isinstance(leaf, Joined) and leaf.told.kind == "flat")


def _add_joined(
    table: Table, key: str, joined: Joined, specs: Specs, index: int, buffers: Set[int]
) -> None:
    """Add a tensor of a merged state: the rows are the same on all ranks, who has it or not.

    Args:
        index: its place among the leaves.
    """
    told, having = joined.told, tuple(sorted(set(joined.ranks)))
    if told.storage is not None and told.storage[1] and len(having) > 1:
        shared = told.storage[1] >= SHARED_FROM
        if shared or joined.leaf is None or not _is_in(joined.leaf, buffers):
            table.copies.append(Copy(index, having, shared))
    # Storages are told apart by the first rank that has them, and their number there.
    place: Any = id(joined) if told.storage is None else (joined.ranks[0], told.storage[0])
    number = table.joined.get(place)
    if number is None:
        number = table.joined[place] = len(table.sources)
        spec = TensorSpec(told.shape, told.dtype)
        if told.storage is not None:
            nbytes = told.storage[1]
            writing = joined.ranks if nbytes >= SHARED_FROM else joined.ranks[:1]
            flat = Flat(tuple((other, 0, nbytes) for other in sorted(writing)) if nbytes else ())
            spec = TensorSpec((nbytes,), torch.uint8, flat)
        elif joined.leaf is not None:
            spec = specs.of(joined.leaf, key)
        if told.kind == "flat" and joined.leaf is None:
            spec = replace(spec, held=Flat(()))
        elif told.mesh is not None:
            grids = tuple(sorted(set(joined.grids)))
            held = spec.held if isinstance(spec.held, Mesh) else told.mesh
            spec = replace(spec, held=held._replace(grids=grids))
            _note_mesh(table, number, spec)
        table.sources.append(Source(key, spec, joined, table.rank))
    table.by_leaf[id(joined)] = number
    # Who has it belongs to the digest: with a tensor that moved, the last plan is no longer right.
    who = (having, tuple(sorted(set(joined.grids))))
    how = (told.likeness()[3:], who)
    table.rows.append((key, number, told.shape, str(told.dtype), repr(how)))


def _note_mesh(table: Table, number: int, spec: TensorSpec) -> int:
    """Enter the mesh of a source; return its number."""
    if not isinstance(spec.held, Mesh):
        return -1
    if not spec.held.right_first:
        table.misfits.append(number)
    mesh = spec.held._replace(right_first=True)
    index = table.meshes.setdefault(mesh, len(table.meshes))
    if index == len(table.grids):
        table.grids.append(mesh.grids)
    return index


def _add_plain(table: Table, key: str, leaf: torch.Tensor, index: int, buffers: Set[int]) -> None:
    storage = leaf.untyped_storage()
    nbytes = storage.nbytes()
    is_buffer = _is_in(leaf, buffers)
    shared = nbytes >= SHARED_FROM and not is_buffer
    if nbytes and not is_buffer:
        table.copies.append(Copy(index, None, shared))
    number = table.by_storage.get(storage._cdata)
    if number is None:
        number = table.by_storage[storage._cdata] = len(table.sources)
        spec = TensorSpec((nbytes,), torch.uint8)
        if not shared:
            spec = replace(spec, held=Flat(((0, 0, nbytes),) if nbytes else ()))
        table.sources.append(Source(key, spec, leaf, table.rank))
    view = (nbytes, leaf.storage_offset(), leaf.stride()) if shared else None
    table.rows.append((key, number, tuple(leaf.shape), str(leaf.dtype), view))


def _is_in(leaf: torch.Tensor, storages: Set[int]) -> bool:
    return bool(storages) and leaf.untyped_storage()._cdata in storages
