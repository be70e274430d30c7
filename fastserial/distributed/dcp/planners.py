"""Planners: torch's, with equal bytes for all ranks and any placement, at little cost.

torch makes the items of all plans, and the metadata. Here is what it asks for the boxes of a
DTensor (`HeldShards`), how what several ranks have is divided (`divide`), and what is kept from one
save to the next.
"""

from __future__ import annotations

import functools
import io
import marshal
import pickle
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from fastserial.checksums import crc32
from fastserial.config import current
from fastserial.distributed.comm.call import ranks_in_words
from fastserial.distributed.comm.replicas import checksums, differing
from fastserial.distributed.layout.boxes import Box
from fastserial.distributed.layout.holders import Share
from fastserial.distributed.layout.placement import as_dtensor, holding, is_over_plain, unloadable
from fastserial.distributed.state.facts import facts_of
from fastserial.distributed.state.tables import SHARED_FROM
from fastserial.errors import UnknownPlacementError
from fastserial.interrupts import ours, suppress
from fastserial.memory.held_settings import paused_collection

_GLOBAL = "global_shape"  # torch 2.15: a plain tensor that has it is a part of another one
_PARTS_EACH = 20  # a dimension with so many rows for each rank can be cut evenly enough
_PLANNING = ("create_local_plan", "create_global_plan", "finish_plan", "lookup_object")

# -- what a rank has of a tensor -------------------------------------------------------------------


class HeldShards:
    """What this rank has of a DTensor: torch's planners are given it in place of the DTensor.

    torch takes a rank's shard for one box, and gets uneven strided shards wrong.

    Attributes:
        parts: boxes of the whole tensor, each with its part of the local one.
    """

    def __init__(self, key: str, value: Any, meshes: dict[int, tuple[int, ...]]) -> None:
        """Find the boxes.

        Args:
            meshes: keeps what is found of meshes while they live.

        Raises:
            LoadMismatchError: its placement cannot be in a file: `Partial`, say.
            UnknownPlacementError: its placement is none of torch's.
        """
        self._value = value
        found = holding(value, key, dist.get_rank(), _all_ranks(dist.get_world_size()), meshes)
        self.parts = found.parts
        if not found.spec.numel:  # of an empty tensor every rank has all
            self.parts = [(whole_box(value), found.local.new_empty(value.shape))]

    def size(self) -> torch.Size:
        """Return the size of the whole tensor; called by torch."""
        size: torch.Size = self._value.size()
        return size

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
            for box, _ in self.parts
        ]

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._value.to_local())
        return [
            _shard_item(key, TensorWriteData(chunk, properties, self.size()))
            for chunk in self.__create_chunk_list__()
        ]


@functools.cache
def _all_ranks(count: int) -> dict[int, int]:
    return {rank: rank for rank in range(count)}


def whole_box(tensor: torch.Tensor) -> Box:
    """Return the box of all elements of a tensor."""
    return Box((0,) * tensor.dim(), tuple(tensor.shape))


def _shard_item(key: str, data: TensorWriteData) -> WriteItem:
    index = MetadataIndex(key, data.chunk.offsets)
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _is_sharded(value: object) -> bool:
    """Return whether a value is a DTensor over plain tensors."""
    sharded = as_dtensor(value)
    if sharded is None or not is_over_plain(sharded):
        return False
    return not hasattr(sharded._local_tensor, "__create_write_items__")


def _is_plain(value: object) -> bool:
    """Return whether a value is a tensor that may be cut anywhere."""
    plain = isinstance(value, torch.Tensor) and unloadable(value) is None
    return plain and not hasattr(value, _GLOBAL)


def _with_shards(state: Mapping[str, Any], meshes: dict[int, tuple[int, ...]]) -> dict[str, Any]:
    """Return a flattened state with `HeldShards` for its DTensors.

    Those remain that this rank has nothing of, or whose placement is none of torch's.
    """
    found = dict(state)
    unknown = ""
    for key, value in state.items():
        if _is_sharded(value) and value.device_mesh.get_coordinate() is not None:
            try:
                found[key] = HeldShards(key, value, meshes)
            except ours(UnknownPlacementError) as error:
                unknown = unknown or str(error)
    if unknown:
        warnings.warn(f"{unknown}. It is left to torch, as are others like it", stacklevel=4)
    return found


# -- who writes what -------------------------------------------------------------------------------


def divide(
    plans: Sequence[SavePlan],
    jobs: Sequence[int],
    lowest: bool,
    whole: Collection[str],
    apart: Collection[str],
) -> list[SavePlan]:
    """Return plans in which each element is written once.

    Of what the same ranks have, each writes about as many bytes: consecutive tensors. All shards of
    a tensor that are not cut come from one replica: nobody compared them.

    Args:
        plans: of the ranks: all that each of them has. Of what differs, the first rank's counts.
        jobs: the job's ranks of the group, which errors name.
        lowest: what several ranks have is written by the first of them.
        whole: keys of what cannot be cut.
        apart: plain tensors that differ between the ranks: the first rank's is saved, as a whole.

    Raises:
        ValueError: a key has a value on some ranks and a tensor on others, or parts of different
            tensors.
    """
    first: dict[MetadataIndex, WriteItem] = {}
    owners: dict[MetadataIndex, list[int]] = {}
    types: dict[str, tuple[bool, int]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            key, is_value = item.index.fqn, item.tensor_data is None
            was_value, other = types.setdefault(key, (is_value, rank))
            if is_value is not was_value:
                raise ValueError(
                    f"{key}: a value on one of the ranks {jobs[other]} and {jobs[rank]}, a tensor "
                    "on the other: give one of them another key"
                )
            if first.setdefault(item.index, item).tensor_data == item.tensor_data:
                owners.setdefault(item.index, []).append(rank)
    totals: dict[tuple[int, ...], int] = {}  # bytes of the tensors of the same ranks
    places: dict[str, tuple[tuple[int, ...], int]] = {}  # these ranks, twice its middle
    kinds: dict[str, tuple[torch.Size, torch.dtype]] = {}
    for index, ranks in owners.items():
        _refuse_mixture(kinds, index.fqn, first[index].tensor_data, jobs[ranks[0]])
        if lowest or first[index].tensor_data is None or index.fqn in apart:
            del ranks[1:]
        if index.fqn not in places:
            nbytes, same = first[index].tensor_storage_size() or 0, tuple(ranks)
            before = totals.get(same, 0)
            places[index.fqn] = same, 2 * before + nbytes
            totals[same] = before + nbytes
    items: list[list[WriteItem]] = [[] for _ in plans]
    for index, ranks in owners.items():
        item = first[index]
        nbytes = item.tensor_storage_size() or 0
        if len(ranks) > 1 and nbytes >= SHARED_FROM and index.fqn not in whole:
            for rank, part in zip(ranks, _parts(item, len(ranks)), strict=True):
                items[rank] += part
        else:
            same, middle = places[index.fqn]
            items[ranks[Share(middle, 2 * totals[same]).of(len(ranks))]].append(item)
    return [replace(plan, items=mine) for plan, mine in zip(plans, items, strict=True)]


def _refuse_mixture(
    kinds: dict[str, tuple[torch.Size, torch.dtype]],
    key: str,
    data: TensorWriteData | None,
    rank: int,
) -> None:
    """Compare what a rank has of a tensor with the first other part of it, which is kept.

    Raises:
        ValueError: it is a part of another tensor.
    """
    if data is not None:
        kind = data.size, data.properties.dtype
        if (other := kinds.setdefault(key, kind)) != kind:
            raise ValueError(
                f"{key}: rank {rank} has a part of a {kind[1]} of shape {tuple(kind[0])}, another "
                f"rank of a {other[1]} of shape {tuple(other[0])}"
            )


def _dim(sizes: Sequence[int], ranks: int) -> int:
    """Return the dimension in which a tensor is cut: the first one that makes enough parts."""
    for dim, size in enumerate(sizes):
        if size >= _PARTS_EACH * ranks:
            return dim
    return max(range(len(sizes)), key=lambda dim: sizes[dim])


def _parts(item: WriteItem, count: int) -> Iterator[list[WriteItem]]:
    """Yield equal parts of a tensor; a list is empty where there are not enough rows."""
    data = item.tensor_data
    if data is None:
        raise ValueError(f"{item.index.fqn} is no tensor")
    dim = _dim(data.chunk.sizes, count)
    rows = data.chunk.sizes[dim]
    for at in range(count):
        low, high = rows * at // count, rows * (at + 1) // count
        offsets, sizes = list(data.chunk.offsets), list(data.chunk.sizes)
        offsets[dim] += low
        sizes[dim] = high - low
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        yield [_shard_item(item.index.fqn, replace(data, chunk=chunk))] if low < high else []


def _sharing(items: Iterable[WriteItem]) -> list[WriteItem]:
    """Return items that share equal objects: each is pickled once."""
    same: dict[Any, TensorWriteData] = {}
    found: list[WriteItem] = []
    for item in items:
        data = item.tensor_data
        if data is not None:
            like = (data.size, data.chunk.offsets, data.chunk.sizes, repr(data.properties))
            data = same.setdefault(like, data)
        found.append(replace(item, tensor_data=data))
    return found


# -- saves -----------------------------------------------------------------------------------------


class _FromRank(NamedTuple):
    """What a rank sends to the coordinator.

    Attributes:
        plan: a pickle of torch's plan, with all that the rank has, and of the keys that stay whole.
        sums: checksums of the plain tensors that may be cut, and of numbers, texts, and nests of
            these.
        rank: in the job.
    """

    plan: bytes
    sums: dict[str, int]
    rank: int


class _ToRank(NamedTuple):
    """What the coordinator sends back: a pickle of the items that a rank is to write."""

    items: bytes


class _OwnPlan(NamedTuple):
    """What this rank's last save was planned from, and what was made of it.

    Attributes:
        facts: what decides the plan; none of the state's tensors is kept.
        plan: as it is sent.
        compared: keys of the plain tensors that may be cut.
        answer: of the coordinator.
        items: what it has.
    """

    facts: Any
    plan: bytes
    compared: list[str]
    answer: bytes = b""
    items: list[WriteItem] = []  # noqa: RUF012 (never changed)


_last = _OwnPlan(None, b"", [])  # replaced as a whole: several threads may save


@functools.lru_cache(maxsize=4)
def _planned(
    plans: tuple[bytes, ...],
    jobs: tuple[int, ...],
    flattened: bool,
    lowest: bool,
    apart: frozenset[str],
) -> tuple[list[bytes], bytes]:
    """Return pickles of each rank's items, and of the metadata, which its user may change.

    A plan is used again if all ranks have what it was made for.
    """
    found: list[tuple[SavePlan, set[str]]] = [pickle.loads(one) for one in plans]
    whole = {key for _, keys in found for key in keys}
    divided = divide([plan for plan, _ in found], jobs, lowest, whole, apart)
    made, metadata = DefaultSavePlanner(flattened).create_global_plan(divided)
    return [pickle.dumps(plan.items) for plan in made], pickle.dumps(metadata)


class FastSavePlanner(DefaultSavePlanner):
    """The `planner` of `dcp.save`. It takes the arguments of `DefaultSavePlanner`.

        writer = distributed.FastStorageWriter("folder")
        dcp.save({"step": 7}, storage_writer=writer, planner=distributed.FastSavePlanner())

    What several ranks have is written by them in turn, so that each has about as many bytes. Plain
    tensors from 1 MiB on are compared in every save (option `compare`); of one that differs between
    ranks, the first rank's is saved, with a warning. With `compare="all"` they are cut, too.

    A class derived from it that overrides what makes plans (`create_local_plan`,
    `create_global_plan`, `finish_plan`, `lookup_object`) gets those of `DefaultSavePlanner`: ours
    have no items before the end, and share what they consist of.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("enable_plan_caching", None)  # ours is always on
        super().__init__(*args, **kwargs)
        kind = type(self)
        self._plans_as_stock = any(
            getattr(kind, name) is not getattr(FastSavePlanner, name) for name in _PLANNING
        )
        if self._plans_as_stock:
            text = f"{kind.__name__} changes plans: they are those of DefaultSavePlanner"
            warnings.warn(text, UserWarning, stacklevel=2)
        elif hasattr(self, "_enable_plan_caching"):
            self._enable_plan_caching = False  # it may have come by position
        self._own: _OwnPlan | None = None  # of this rank, while the save is planned
        self._meshes: dict[int, tuple[int, ...]] = {}  # what is known of the meshes of this save

    def create_local_plan(self) -> SavePlan:
        """Return a plan without items, which says what this rank has.

        Raises:
            LoadMismatchError: a placement cannot be saved: `Partial`, say.
        """
        if self._plans_as_stock:
            return super().create_local_plan()
        self._meshes = {}
        with paused_collection():
            self._own = own = self._own_plan()
        tensors = [self.state_dict[key] for key in own.compared]
        sums = checksums(tensors, current().compare == "all")
        found = dict(zip(own.compared, sums, strict=True))
        if dist.is_initialized():
            found.update(_sums_of_values(self.state_dict))
        message = _FromRank(own.plan, found, dist.get_rank() if dist.is_initialized() else 0)
        self.plan = SavePlan([], planner_data=message)
        return self.plan

    def _own_plan(self) -> _OwnPlan:
        """Return what this rank has: as at the last save, if nothing has changed."""
        state = self.state_dict
        tensors = {key: one for key, one in state.items() if isinstance(one, torch.Tensor)}
        others = {key: one for key, one in state.items() if key not in tensors}
        facts: Any = facts_of(list(tensors), list(tensors.values()))
        if any(hasattr(one, "__create_write_items__") for one in others.values()):
            facts = None  # only they know what they consist of
        compare = current().compare
        may_cut = dist.is_initialized() and not self.dedup_save_to_lowest_rank
        if facts is not None:
            facts = [facts, list(others), self.mappings, may_cut, compare]
            if facts == _last.facts:
                return _last
        self.state_dict = _with_shards(state, self._meshes)
        try:
            plan = super().create_local_plan()
        finally:
            self.state_dict = state
        plain = [key for key, one in tensors.items() if _is_plain(one)]
        # Only what is compared in whole may be divided.
        whole = state.keys() - {*(plain if compare == "all" else ())}
        message = pickle.dumps((replace(plan, items=_sharing(plan.items)), whole))
        compared = [key for key in plain if may_cut and tensors[key].nbytes >= SHARED_FROM]
        return _OwnPlan(facts, message, compared)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return what each rank writes. On the coordinator.

        Raises:
            ValueError: the ranks' parts of a tensor do not make up the tensor, or a rank has
                another kind of planner.
        """
        messages: list[_FromRank] = [plan.planner_data for plan in all_plans]
        for rank, message in enumerate(messages):
            if isinstance(message, _FromRank) is self._plans_as_stock:
                raise _other_planner(f"rank {rank} of the process group")
        if self._plans_as_stock:
            return super().create_global_plan(all_plans)
        mixed = differing([message.sums for message in messages])
        plans = tuple(message.plan for message in messages)
        jobs = tuple(message.rank for message in messages)
        with paused_collection():
            items, metadata = _planned(
                plans,
                jobs,
                self.flatten_state_dict,
                self.dedup_save_to_lowest_rank,
                frozenset(mixed),
            )
            self.metadata = pickle.loads(metadata)
        _warn({key: [jobs[rank] for rank in ranks] for key, ranks in mixed.items()})
        answers = [
            replace(plan, planner_data=_ToRank(mine))
            for plan, mine in zip(all_plans, items, strict=True)
        ]
        return answers, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return what this rank writes.

        Raises:
            ValueError: the coordinator has another kind of planner.
        """
        if self._plans_as_stock:
            return super().finish_plan(new_plan)
        global _last
        message, own = new_plan.planner_data, self._own
        self._own = None
        if not isinstance(message, _ToRank) or own is None:
            raise _other_planner("the coordinator")
        if own.answer != message.items:
            with paused_collection():
                own = own._replace(answer=message.items, items=pickle.loads(message.items))
        _last = own
        self.plan = replace(new_plan, items=list(own.items), planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the tensor, or the part of one, or the bytes that an item is."""
        data, key = write_item.tensor_data, write_item.index.fqn
        value = self.state_dict.get(key)
        part: torch.Tensor | None = None
        if data is not None and not self._plans_as_stock:
            with suppress(UnknownPlacementError):  # then torch made the plan
                part = self._part(key, value, data.chunk)
        if part is None:
            found: torch.Tensor | io.BytesIO = super().resolve_data(write_item)
            return found
        return self.transform_object(write_item, part)  # type: ignore[no-any-return]

    def _part(self, key: str, value: Any, chunk: ChunkStorageMetadata) -> torch.Tensor | None:
        """Return the part of a tensor that a chunk is; None: torch has to find it."""
        is_sharded = _is_sharded(value)
        if not is_sharded and not _is_plain(value):
            return None
        with torch.no_grad():
            local: torch.Tensor = value.to_local() if is_sharded else value
        if local.shape == chunk.sizes:  # all of it: parts of a shard are smaller
            return local
        parts = [(whole_box(local), local)]
        if is_sharded:
            parts = HeldShards(key, value, self._meshes).parts
        wanted = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        for box, view in parts:
            if box.contains(wanted):
                return view[wanted.slices(box)]
        raise ValueError(f"{key}: this rank does not have the part {wanted}")


def _sums_of_values(state: Mapping[str, Any]) -> dict[str, int]:
    """Return checksums of the entries that are numbers, texts, or nests of these."""
    found: dict[str, int] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            with suppress(ValueError):  # it is, or holds, something else
                found[key] = crc32(marshal.dumps(value, 2))
    return found


def _other_planner(whose: str) -> ValueError:
    return ValueError(
        f"{whose} has another kind of planner; use FastSavePlanner on all ranks, or on none"
    )


def _warn(mixed: Mapping[str, Sequence[int]]) -> None:
    if mixed:
        keys = list(mixed)
        more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
        text = (
            f"plain tensors or values of {ranks_in_words(mixed[keys[0]])} differ from the first "
            f"rank's, which are saved: {', '.join(map(repr, keys[:5]))}{more}. Parts of one tensor "
            "have to be DTensors, and values of each rank need keys of their own"
        )
        warnings.warn(text, UserWarning, stacklevel=3)


# -- loads -----------------------------------------------------------------------------------------


class FastLoadPlanner(DefaultLoadPlanner):
    """The `planner` of `dcp.load`.

        reader = distributed.FastStorageReader("folder")
        dcp.load({"step": 0}, storage_reader=reader, planner=distributed.FastLoadPlanner())

    It takes the arguments of `DefaultLoadPlanner`. Each rank keeps its own plan: none is sent.

    Attributes:
        views: what is filled of DTensors.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._own: LoadPlan | None = None
        self.views: dict[MetadataIndex, torch.Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        """Make and keep this rank's plan; return an empty one.

        Raises:
            RuntimeError: the checkpoint lacks a key.
            ValueError: a tensor has another shape there.
        """
        state = self.state_dict
        with paused_collection():
            self.state_dict = shown = _with_shards(state, {})
            try:
                self._own = super().create_local_plan()
            finally:
                if self.state_dict is shown:  # torch flattens anew for an old checkpoint
                    self.state_dict = state
            self.views = {
                MetadataIndex(key, torch.Size(box.offsets)): view
                for key, one in shown.items()
                if isinstance(one, HeldShards)
                for box, view in one.parts
            }
        return LoadPlan([])

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Return this rank's plan."""
        own, self._own = self._own, None
        if own is None:
            return super().finish_plan(new_plan)
        return replace(own, storage_data=new_plan.storage_data)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the tensor of an index."""
        view = self.views.get(index)
        return view if view is not None else super().lookup_tensor(index)
