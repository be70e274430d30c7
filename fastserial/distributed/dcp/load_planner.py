"""`FastLoadPlanner`: each rank plans for itself; one rank may read a large piece for several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fastserial.distributed.dcp.planning import (
    REPLICA,
    SHARD,
    chunk_of,
    kind_of,
    parts_of,
    whole_box,
)
from fastserial.distributed.plan.balance import Workload, assign
from fastserial.distributed.ranks.group import Traffic, node_name
from fastserial.memory.held_settings import paused_collection
from fastserial.memory.storages import is_plain

SHARED_FROM = 1024 * 1024  # bytes; smaller pieces are read by each rank
TIMEOUT = 1800.0  # seconds: a rank may still be reading when others wait for it
_MESSAGE = 32 * 1024 * 1024  # bytes of one message


class PieceRequest(NamedTuple):
    """A part of a stored tensor that a rank wants.

    Attributes:
        key, chunk: of the chunk of the checkpoint that it is in.
        first, lengths: the elements of that chunk.
        dtype: of the target.
        nbytes: of it.
    """

    key: str
    chunk: tuple[int, ...]
    first: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


def read_together(
    items: Sequence[ReadItem],
    planner: LoadPlanner,
    traffic: Traffic,
    read: Callable[[list[ReadItem]], None],
) -> None:
    """Read items; what several ranks want, one of them reads and sends to the others. Collective.

    Args:
        items: of this rank.
        read: reads some of them.

    Raises:
        DistributedError: another rank failed.
    """
    wanted: dict[PieceRequest, list[ReadItem]] = {}
    for item in items:
        request = _request(item, planner)
        if request is not None:
            wanted.setdefault(request, []).append(item)
    once = [request for request, some in wanted.items() if len(some) == 1]
    shared: list[tuple[PieceRequest, int, tuple[int, ...]]] = traffic.decide(once, _shared)
    mine = [
        (wanted[request][0], reader, tuple(rank for rank in ranks if rank != reader))
        for request, reader, ranks in shared
        if traffic.rank in ranks
    ]
    received = {id(item): item for item, reader, _ in mine if reader != traffic.rank}
    read([item for item in items if id(item) not in received])
    pass_on(
        [(planner.resolve_tensor(item).detach(), reader, ranks) for item, reader, ranks in mine],
        traffic,
    )
    for item in received.values():
        planner.commit_tensor(item, planner.resolve_tensor(item).detach())


def _request(item: ReadItem, planner: LoadPlanner) -> PieceRequest | None:
    """Return the request for an item that others may request, too; None if it is small."""
    index = item.storage_index
    if item.type != LoadItemType.TENSOR:
        return None
    target = planner.resolve_tensor(item)
    nbytes = prod(item.lengths) * target.itemsize
    if nbytes < SHARED_FROM:
        return None
    places = (tuple(index.offset or ()), tuple(item.storage_offsets), tuple(item.lengths))
    return PieceRequest(index.fqn, *places, target.dtype, nbytes)


def _shared(
    requests: Sequence[Sequence[PieceRequest]],
) -> list[tuple[PieceRequest, int, tuple[int, ...]]]:
    """Return what several ranks request, who reads it, and who wants it.

    All of them read about as much.
    """
    ranks: dict[PieceRequest, list[int]] = {}
    for rank, some in enumerate(requests):
        for request in some:
            ranks.setdefault(request, []).append(rank)
    shared = [(request, tuple(found)) for request, found in ranks.items() if len(found) > 1]
    items = [Workload(request.nbytes, found) for request, found in shared]
    return [
        (shared[share.item][0], share.rank, shared[share.item][1])
        for share in assign(items, len(requests))
    ]


def pass_on(mine: Sequence[tuple[torch.Tensor, int, tuple[int, ...]]], traffic: Traffic) -> None:
    """Send what this rank has read, and receive what others have.

    Args:
        mine: targets, each with the rank that has read it and the others that want it.

    Raises:
        DistributedError: a rank failed.
    """
    pending: list[Callable[[], None]] = []
    for target, reader, receivers in mine:
        for piece in _messages(target):
            is_host = is_plain(piece) and piece.is_contiguous() and piece.device.type == "cpu"
            host = piece
            if not is_host:
                host = torch.empty(piece.shape, dtype=piece.dtype, device="cpu")
            data = host.view(-1).view(torch.uint8)
            if reader == traffic.rank:
                if not is_host:
                    host.copy_(piece)
                started = [traffic.send(rank, data) for rank in receivers]
                _wait_for(pending)  # the message before: at most two are pending
                pending = started
            else:
                traffic.receive(reader, data)()
                if not is_host:
                    piece.copy_(host)
    _wait_for(pending)


def _wait_for(pending: Sequence[Callable[[], None]]) -> None:
    for wait in pending:
        wait()


def _messages(target: torch.Tensor) -> Iterator[torch.Tensor]:
    """Cut a tensor into messages; where depends on its shape alone."""
    dim = max(range(target.dim()), key=lambda dim: (target.shape[dim], -dim))
    rows = max(1, _MESSAGE * target.shape[dim] // max(1, target.numel() * target.itemsize))
    for first in range(0, target.shape[dim], rows):
        yield target.narrow(dim, first, min(rows, target.shape[dim] - first))


_KNOWN = {"flatten_state_dict", "flatten_sharded_tensors", "allow_partial_load"}


class FastLoadPlanner(DefaultLoadPlanner):
    """The `planner` of `dcp.load`.

        reader = distributed.FastStorageReader("folder")
        dcp.load({"step": 0}, storage_reader=reader, planner=distributed.FastLoadPlanner())

    It takes the arguments of `DefaultLoadPlanner`.
    """

    def __init__(
        self, *args: Any, broadcast: bool | Literal["auto"] = "auto", **kwargs: Any
    ) -> None:
        """Make a planner.

        Args:
            args, kwargs: of `DefaultLoadPlanner`.
            broadcast: pieces of 1 MiB and more that several ranks request are read by one of them,
                which sends them to the others, with `FastStorageReader`, in a load by all ranks of
                the job. `"auto"`: if these are on several nodes; on one the page cache is faster.
        """
        super().__init__(*args, **kwargs)
        self._broadcast = broadcast
        self.reads_together = False  # whether ranks read for each other, in this load
        self._plans_as_stock = not set(kwargs) <= _KNOWN  # arguments of a later torch
        self._own: LoadPlan | None = None
        self._views: dict[MetadataIndex, torch.Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        """Make and keep this rank's plan; return only which rank it is.

        Raises:
            RuntimeError: the checkpoint lacks a key.
            ValueError: a tensor has another shape there.
        """
        self._views = {}
        with paused_collection():
            items = None if self._plans_as_stock else self._items()
        self._own = super().create_local_plan() if items is None else LoadPlan(items)
        shares = self._broadcast and _ranks_of_job() > 1
        return LoadPlan([], planner_data=(dist.get_rank(), node_name()) if shares else None)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans, with whether ranks read for each other."""
        ranks = [plan.planner_data for plan in global_plan]
        # A planner does not know the group: it has to be that of the whole job, in its order.
        able = len(ranks) == _ranks_of_job() and all(
            isinstance(one, tuple) and one[0] == rank for rank, one in enumerate(ranks)
        )
        together = able and (self._broadcast != "auto" or len({node for _, node in ranks}) > 1)
        return [replace(plan, planner_data=together) for plan in global_plan]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Return this rank's plan."""
        own, self._own = self._own, None
        if own is None:
            return super().finish_plan(new_plan)
        self.reads_together = new_plan.planner_data is True
        return replace(own, storage_data=new_plan.storage_data)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the tensor of an index."""
        view = self._views.get(index)
        return view if view is not None else super().lookup_tensor(index)

    def _items(self) -> list[ReadItem] | None:
        """Return what is to be read; None: torch has to plan, as for old checkpoints."""
        if self.metadata is None:
            return None
        entries = self.metadata.state_dict_metadata
        if any(key not in entries for key in self.state_dict):
            return None
        found: list[ReadItem] = []
        meshes: dict[int, tuple[int, ...]] = {}
        for key, value in self.state_dict.items():
            entry = entries[key]
            if isinstance(entry, BytesStorageMetadata):
                found.append(_bytes_item(key))
                continue
            kind = kind_of(value)
            if kind not in (REPLICA, SHARD):
                return None
            if entry.size != value.shape:
                raise ValueError(
                    f"Size mismatch between saved {entry.size} and current: {value.shape} for {key}"
                )
            found += self._items_of(key, value, kind, entry, meshes)
        return found

    def _items_of(
        self,
        key: str,
        value: Any,
        kind: int,
        entry: TensorStorageMetadata,
        meshes: dict[int, tuple[int, ...]],
    ) -> list[ReadItem]:
        if kind == REPLICA:
            boxes = [whole_box(value.shape)]
        elif value.device_mesh.get_coordinate() is None:
            return []
        else:
            parts = parts_of(value, key, meshes)
            boxes = [box for box, _ in parts]
            for box, view in parts:
                self._views[MetadataIndex(key, box.offsets)] = view
        return list(create_read_items_for_chunk_list(key, entry, list(map(chunk_of, boxes))))


def _ranks_of_job() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _bytes_item(key: str) -> ReadItem:
    zero = torch.Size((0,))
    index = MetadataIndex(key)
    return ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero)
