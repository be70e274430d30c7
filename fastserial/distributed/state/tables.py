"""What a state consists of, on this rank: its tensors as sources of bytes, and a digest.

A source becomes one record of the file: a sharded tensor as a whole, or the storage of plain
tensors, which may be views of it. Ranks whose tables are alike know each other's sources by
number. A table holds none of the tensors.
"""

from __future__ import annotations

import hashlib
import marshal
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any

import torch

from fastserial.distributed.comm.exchange import gathered_memory, is_consecutive, on_host
from fastserial.distributed.layout.boxes import Box, run_of, runs_of
from fastserial.distributed.layout.flat_shard import FlatShard
from fastserial.distributed.layout.placement import (
    Flat,
    Mesh,
    TensorSpec,
    is_sharded,
    local_of,
    views,
)
from fastserial.distributed.state.merging import Describer, LeafSpec, leaf_of
from fastserial.errors import ConfigError
from fastserial.memory.storages import (
    HostMemory,
    Memory,
    StorageMemory,
    synchronize,
)
from fastserial.overlap.snapshot import StoragePart

# Bytes of a storage from which on every rank writes a part of it. Below it counts what rank 0 has:
# buffers of a data-parallel model may differ, and the file is what rank 0 would have saved.
SHARED_FROM = 1024 * 1024
_REMEDY = ' (merge="union" of distributed.save and save_async saves those of all ranks)'

Grids = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class RecordSource:
    """What this rank holds of one record-to-be.

    Attributes:
        key: the name of the first leaf that has it.
        spec: the whole; a storage counts as bytes.
        leaf: that first leaf; None: this rank has none.
        rank: this rank.
    """

    key: str
    spec: TensorSpec
    leaf: Any
    rank: int
    _parts: list[tuple[Box, torch.Tensor]] | None = None
    _runs: list[tuple[int, torch.Tensor]] | None = None

    def release(self) -> None:
        """Drop the tensor; key and spec stay."""
        self.leaf = self._parts = self._runs = None

    @property
    def parts(self) -> list[tuple[Box, torch.Tensor]]:
        """What this rank holds of it, made when it is asked for first.

        Raises:
            LoadMismatchError: a shard is not what its placements say.
        """
        if self._parts is None:
            leaf = self.leaf
            if leaf is None:
                self._parts = []
            elif not is_sharded(leaf):
                memory = bytes_of(leaf.untyped_storage())
                self._parts = [(Box((0,), (memory.numel(),)), memory)] if memory.numel() else []
            else:
                self._parts = views(self.spec, self.rank, local_of(leaf, self.key), self.key)
        return self._parts

    def memory(self, start: int) -> Memory:
        """Return the memory that has byte `start` of the whole, and what this rank has around it.

        It begins at the whole's first byte, so that an offset in the whole is one in the memory.
        """
        view, base = self._run_at(start)
        if not is_consecutive(view):
            return gathered_memory(view, base, self.spec.nbytes)
        if on_host(view):
            return HostMemory(view.data_ptr() - base, self.spec.nbytes, view)
        first = int(view.storage_offset()) * view.element_size() - base
        return StorageMemory(view.untyped_storage(), first)

    def part(self, start: int, length: int) -> StoragePart:
        """Return bytes [start, start + length) of the whole as what a snapshot takes."""
        view, base = self._run_at(start)
        if not is_consecutive(view):
            return StoragePart(gathered_memory(view, base, self.spec.nbytes), start, length)
        first = int(view.storage_offset()) * view.element_size() + start - base
        return StoragePart(view.untyped_storage(), first, length)

    def _run_at(self, start: int) -> tuple[torch.Tensor, int]:
        """Return the view that has a byte of the whole, and its own first byte there."""
        if self._runs is None:
            if isinstance(self.leaf, FlatShard):
                self._runs = [(self.leaf.start, local_of(self.leaf, self.key))]
            else:
                runs = ((run_of(self.spec.shape, box), view) for box, view in self.parts)
                found = [(run[0], view) for run, view in runs if run is not None]
                self._runs = sorted(found, key=itemgetter(0))
        item = self.spec.dtype.itemsize
        index = bisect_right(self._runs, start // item, key=itemgetter(0)) - 1
        first, view = self._runs[index]
        return view, first * item


def sources_of(
    table: StateTable,
    specs: Sequence[TensorSpec],
    values: Sequence[Any],
    rank: int,
    rest: Sequence[torch.UntypedStorage] = (),
) -> list[RecordSource]:
    """Return the sources of a table with the tensors of one save, by their numbers.

    Args:
        specs: of the sources, completed.
        values: the leaves of the state.
        rank: this rank.
        rest: storages that only rank 0 has: sources -1, -2, ….
    """
    columns = zip(table.keys, specs, table.firsts, strict=True)
    found = [RecordSource(key, spec, leaf_of(values[at]), rank) for key, spec, at in columns]
    for storage in reversed(rest):
        spec = TensorSpec((storage.nbytes(),), torch.uint8)
        found.append(RecordSource("a storage of rank 0", spec, bytes_of(storage), rank))
    return found


def devices_of(sources: Iterable[RecordSource]) -> set[torch.device]:
    """Return the devices that hold what this rank has of sources."""
    return {
        tensor.device for tensor in _tensors(one.leaf for one in sources) if not on_host(tensor)
    }


def _tensors(leaves: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors of leaves that this rank has."""
    for leaf in leaves:
        if leaf is not None:
            yield leaf.tensor if isinstance(leaf, FlatShard) else leaf


@dataclass(slots=True, eq=False)
class StateTable:
    """The tensors of a state, without them.

    Attributes:
        keys, specs, firsts: of each source, in the order of the state: the name of its first leaf,
            the tensor, and which of the leaves that is.
        of_leaves: number of the source of each leaf.
        rows: of each leaf, what has to be the same on all ranks, as plain values.
        flat: sources that are FlatShards.
        of_rank: sources that are storages of which the file has one rank's, with that rank.
        meshes, grids: each mesh that is in the rows, and its ranks. Ranks may be on different
            meshes of one shape: then each mesh has the whole tensor.
        copies: the leaves that are plain tensors of several ranks, and should be equal; whether
            the ranks write them together, or the file has one rank's.
    """

    keys: list[str] = field(default_factory=list)
    specs: list[TensorSpec] = field(default_factory=list)
    firsts: list[int] = field(default_factory=list)
    of_leaves: list[int] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    flat: list[int] = field(default_factory=list)
    of_rank: dict[int, int] = field(default_factory=dict)
    meshes: dict[Mesh, int] = field(default_factory=dict)
    grids: list[Grids] = field(default_factory=list)
    copies: dict[int, bool] = field(default_factory=dict)
    _digest: bytes = b""

    @property
    def digest(self) -> bytes:
        """What is the same on all ranks if and only if their tables are alike."""
        if not self._digest:
            self._digest = hashlib.sha256(marshal.dumps(self.rows, 2)).digest()
        return self._digest

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return what this rank holds of each FlatShard: source, first element, end."""
        return [
            (number, first, stop)
            for number in self.flat
            if isinstance(held := self.specs[number].held, Flat)
            for _, first, stop in held.ranges
        ]

    def completed(
        self,
        ranges: Mapping[int, list[tuple[int, int, int]]],
        grids: Sequence[Grids],
        records: Iterable[tuple[int, int, int, int]],
    ) -> list[TensorSpec]:
        """Return the specs with what the other ranks hold.

        Args:
            ranges: what the ranks hold of each FlatShard: rank, first element, end.
            grids: of each mesh, those of all ranks.
            records: see `FilePlan`. A storage of which the file has one rank's may have another
                size here.

        Raises:
            ConfigError: the FlatShards of a tensor do not make it up.
        """
        specs = list(self.specs)
        for number in self.flat:
            found = tuple(sorted(map(tuple, ranges.get(number, ()))))
            _refuse_gaps(self.keys[number], specs[number].numel, found)
            specs[number] = replace(specs[number], held=Flat(found))  # type: ignore[arg-type]
        for number, spec in enumerate(self.specs):
            if isinstance(spec.held, Mesh):
                held = spec.held._replace(grids=grids[self.meshes[spec.held]])
                specs[number] = replace(spec, held=held)
        for _, number, _, nbytes in records:
            if (rank := self.of_rank.get(number)) is not None:
                specs[number] = _bytes_on([rank], nbytes)
        return specs


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


def difference(mine: list[tuple[Any, ...]], other: list[tuple[Any, ...]], root: str) -> str | None:
    """Return in words how the rows of another rank differ from rank 0's, None if they do not.

    Args:
        root: what rank 0 is called.
    """
    if mine == other:
        return None
    ours, theirs = {row[0]: row for row in mine}, {row[0]: row for row in other}
    for key in ours.keys() ^ theirs.keys():
        has, lacks = (f"{root} has", "it has") if key in ours else ("it has", f"{root} has")
        return f"{has} the tensor {key!r}, which {lacks} not" + _REMEDY
    for key, row in ours.items():
        there = theirs[key]
        if row[2:4] != there[2:4]:
            return f"its {key!r} is {_words(there)}, that of {root} {_words(row)}"
        if row[4:] != there[4:]:
            return f"its {key!r} is placed otherwise than that of {root}"
    return (
        "its tensors are in another order, or share their memory otherwise, than those of " + root
    )


def _words(row: tuple[Any, ...]) -> str:
    return f"{row[3]} of shape {row[2]}"


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a storage as a one-dimensional tensor of bytes."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage)


def synchronize_devices(values: Iterable[Any]) -> None:
    """Wait for the work queued on the devices of tensors: other threads will copy them."""
    away = {one.device: one for one in _tensors(map(leaf_of, values)) if not on_host(one)}
    synchronize([local_of(one).untyped_storage() for one in away.values()])


def table_of(
    found: Iterable[tuple[str, Any]],
    rank: int,
    ranks: Mapping[int, int],
    buffers: Set[int] = frozenset(),
) -> StateTable:
    """Return the table of a state.

    Args:
        found: its tensors (`walk.leaves`).
        rank: this rank in the group.
        ranks: the group's rank of each global rank.
        buffers: identities of the storages of modules' buffers, which count as rank 0 has them.

    Raises:
        LoadMismatchError: no load could fill a tensor, or its placement cannot be in a file.
    """
    making = _TableMaker(Describer(rank, ranks, buffers))
    for index, (key, value) in enumerate(found):
        making.add(index, key, value)
    return making.table


class _TableMaker:
    """Makes a table, leaf by leaf."""

    def __init__(self, describer: Describer) -> None:
        self.table = StateTable()
        self._describer = describer
        self._numbers: dict[Any, int] = {}  # of sources, by what identifies them
        # What is known of lists of ranks, by their `id`, with them: many tensors have the same.
        self._ranks: dict[int, tuple[Any, tuple[int, ...], tuple[Any, ...]]] = {}
        self._placed: dict[int, tuple[Any, ...]] = {}  # what rows say of a spec, by its `id`

    def add(self, index: int, key: str, value: Any) -> None:
        """Add a leaf."""
        table = self.table
        like = value
        if not isinstance(value, LeafSpec):
            like = self._describer.describe(value, key)
        ranks, runs = self._ranks_of(like)
        # A storage is identified by the first rank that has it, and its number there.
        identity = id(value) if like.storage is None else (ranks and ranks[0], like.storage[0])
        number = self._numbers.setdefault(identity, len(table.keys))
        if number == len(table.keys):
            table.keys.append(key)
            table.firsts.append(index)
            if like.storage is None:
                self._add_sharded(number, key, like, ranks)
            else:
                table.specs.append(self._spec_of_storage(number, like, ranks))
        shape, dtype, placed = self._placed_as(table.specs[number], like)
        if like.storage is not None:
            shared = _is_shared(like)
            if like.spec.numel and not like.is_buffer and (ranks is None or len(ranks) > 1):
                table.copies[index] = shared
            placed = like.storage[1:] if shared or ranks is not None else None
        # The ranks that have it belong to the digest: if a tensor moved, the last plan is wrong.
        table.rows.append((key, number, shape, dtype, placed, runs))
        table.of_leaves.append(number)

    def _ranks_of(
        self, like: LeafSpec
    ) -> tuple[tuple[int, ...] | None, tuple[tuple[int, int], ...] | None]:
        """Return the ranks that have a tensor, in order, and as first ones and ends."""
        if like.ranks is None:
            return None, None
        found = self._ranks.get(id(like.ranks))
        if found is None:
            ranks = tuple(sorted(set(like.ranks)))
            runs = tuple(runs_of(ranks))
            found = self._ranks[id(like.ranks)] = like.ranks, ranks, runs
        return found[1:]

    def _add_sharded(
        self, number: int, key: str, like: LeafSpec, ranks: tuple[int, ...] | None
    ) -> None:
        """Add the source of a DTensor or a FlatShard."""
        table, spec = self.table, like.spec
        if ranks is not None:
            if isinstance(spec.held, Mesh):
                held: Any = spec.held._replace(grids=tuple(sorted(set(like.grids))))
            elif like.leaf is None:
                held = Flat(())
            else:
                held = self._describer.describe(like.leaf, key).spec.held
            spec = replace(spec, held=held)
        if not isinstance(spec.held, Mesh):
            table.flat.append(number)
        elif table.meshes.setdefault(spec.held, len(table.meshes)) == len(table.grids):
            table.grids.append(spec.held.grids)
        table.specs.append(spec)

    def _spec_of_storage(
        self, number: int, like: LeafSpec, ranks: tuple[int, ...] | None
    ) -> TensorSpec:
        """Return the storage of a plain tensor as bytes, held by the ranks that may write it."""
        nbytes = like.storage[1] if like.storage is not None else 0
        if _is_shared(like):
            return _bytes_on(ranks, nbytes)
        rank = self.table.of_rank[number] = ranks[0] if ranks else 0
        return _bytes_on([rank], nbytes)

    def _placed_as(self, spec: TensorSpec, like: LeafSpec) -> tuple[Any, ...]:
        """Return what a row says of a tensor: shape, dtype, and how a DTensor is placed."""
        if like.storage is not None:
            return like.spec.shape, str(like.spec.dtype), None
        found = self._placed.get(id(spec))
        if found is None:
            placed: Any = None
            if isinstance(spec.held, Mesh):
                splits = tuple(map(tuple, spec.held.splits))
                placed = (self.table.meshes[spec.held], spec.held.shape, splits)
            found = self._placed[id(spec)] = (spec.shape, str(spec.dtype), placed)
        return found


def _is_shared(like: LeafSpec) -> bool:
    """Return whether the ranks write a plain tensor together."""
    return like.storage is not None and like.storage[1] >= SHARED_FROM and not like.is_buffer


def _bytes_on(ranks: Sequence[int] | None, nbytes: int) -> TensorSpec:
    """Return bytes of which each of some ranks has all; None: all ranks."""
    held = None
    if ranks is not None:
        held = Flat(tuple((rank, 0, nbytes) for rank in ranks) if nbytes else ())
    return TensorSpec((nbytes,), torch.uint8, held)
