"""`FastLoadPlanner`: each rank plans for itself; one rank may read a large piece for several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fastserial.distributed.dcp.entries import (
    REPLICA,
    SHARD,
    chunk_of,
    kind_of,
    parts_of,
    whole_box,
)
from fastserial.distributed.plan.balance import Workload, assign
from fastserial.distributed.ranks.group import Traffic, collective, node_name
from fastserial.memory.held_settings import paused_collection
from fastserial.memory.storages import is_plain

__all__ = ["SHARED_FROM", "FastLoadPlanner", "SharedRead", "pass_on"]

SHARED_FROM = 1024 * 1024  # bytes; smaller pieces are read by each rank
_MESSAGE = 32 * 1024 * 1024  # bytes of one message


class PieceRequest(NamedTuple):
    """A piece of a stored tensor.

    Attributes:
        key, chunk: of the part of the checkpoint that it is in.
        first, lengths: the elements of that part.
        dtype: of the target.
        nbytes: of it.
    """

    key: str
    chunk: tuple[int, ...]
    first: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class RankRequests(NamedTuple):
    """The pieces that a rank of the job requests, and the node that it is on."""

    rank: int
    node: str
    pieces: list[PieceRequest]


class SharedRead(NamedTuple):
    """A piece that is read by one rank and sent to others.

    Attributes:
        number: of the piece among those that this rank requests.
        reader, receivers: ranks.
    """

    number: int
    reader: int
    receivers: tuple[int, ...]


def shared_reads(ranks: Sequence[RankRequests]) -> list[list[SharedRead]]:
    """Return each rank's shared reads, in an order that is the same on all.

    Each piece is read by one of the ranks that request it, so that all of them read about as much.
    """
    requesting: dict[PieceRequest, list[tuple[int, int]]] = {}
    for rank, requests in enumerate(ranks):
        for number, piece in enumerate(requests.pieces):
            requesting.setdefault(piece, []).append((rank, number))
    shared = [
        (piece, found)
        for piece, found in requesting.items()
        if len({rank for rank, _ in found}) == len(found)  # none twice on one rank
    ]
    items = [Workload(piece.nbytes, tuple(rank for rank, _ in found)) for piece, found in shared]
    made: list[list[SharedRead]] = [[] for _ in ranks]
    for share in assign(items, len(ranks)):
        found = shared[share.item][1]
        receivers = tuple(rank for rank, _ in found if rank != share.rank)
        for rank, number in found if receivers else ():
            made[rank].append(SharedRead(number, share.rank, receivers))
    return made


def pass_on(
    mine: Sequence[SharedRead], target_of: Callable[[int], torch.Tensor], traffic: Traffic
) -> None:
    """Send what this rank has read, and receive what others have.

    Args:
        target_of: returns the target of a piece, by its number.

    Raises:
        DistributedError: a rank failed.
    """
    pending: list[Callable[[], None]] = []
    for number, reader, receivers in mine:
        for piece in _messages(target_of(number)):
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
    dim = max(range(target.dim()), key=lambda dim: (target.shape[dim] > _rows(target), -dim))
    rows = max(1, _MESSAGE // max(1, target.numel() * target.itemsize // target.shape[dim]))
    for first in range(0, target.shape[dim], rows):
        yield target.narrow(dim, first, min(rows, target.shape[dim] - first))


def _rows(target: torch.Tensor) -> int:
    return target.numel() * target.itemsize // _MESSAGE


_TIMEOUT = 1800.0  # seconds: a rank may still be reading when others wait for it
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
        self._shared: list[ReadItem] = []
        self._reads: list[SharedRead] | None = None
        self._plans_as_stock = not set(kwargs) <= _KNOWN  # arguments of a later torch
        self._own: LoadPlan | None = None
        self._views: dict[MetadataIndex, torch.Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        """Make and keep this rank's plan; return only the pieces that others may request, too.

        Raises:
            RuntimeError: the checkpoint lacks a key.
            ValueError: a tensor has another shape there.
        """
        self._views = {}
        with paused_collection():
            items = None if self._plans_as_stock else self._items()
        self._own = own = super().create_local_plan() if items is None else LoadPlan(items)
        self._shared, self._reads = [], None
        if not self._broadcast or _ranks_of_job() < 2:
            return LoadPlan([])
        pieces: list[PieceRequest] = []
        for item in own.items:
            request = self._request(item)
            if request is not None:
                self._shared.append(item)
                pieces.append(request)
        return LoadPlan([], planner_data=RankRequests(dist.get_rank(), node_name(), pieces))

    def _request(self, item: ReadItem) -> PieceRequest | None:
        """Return the request for an item that others may request, too; None if it is small."""
        index = item.storage_index
        if item.type != LoadItemType.TENSOR:
            return None
        target = self.resolve_tensor(item)
        nbytes = prod(item.lengths) * target.itemsize
        if nbytes < SHARED_FROM:
            return None
        places = (tuple(index.offset or ()), tuple(item.storage_offsets), tuple(item.lengths))
        return PieceRequest(index.fqn, *places, target.dtype, nbytes)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are, or with what each rank reads for others."""
        requests = [plan.planner_data for plan in global_plan]
        # A planner does not know the group: it has to be that of the whole job, in its order.
        able = len(requests) == _ranks_of_job() and all(
            isinstance(one, RankRequests)
            and one.rank == rank
            and getattr(plan.storage_data, "passes_on", False)
            for rank, (one, plan) in enumerate(zip(requests, global_plan, strict=True))
        )
        several = self._broadcast != "auto" or len({one.node for one in requests if able}) > 1
        made = shared_reads(requests) if able and several else []
        if not any(made):
            return [replace(plan, planner_data=None) for plan in global_plan]
        return [
            replace(plan, planner_data=found) for plan, found in zip(global_plan, made, strict=True)
        ]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Return this rank's plan."""
        own, self._own = self._own, None
        if own is None:
            return super().finish_plan(new_plan)
        shared = new_plan.planner_data
        self._reads = shared if isinstance(shared, list) else None
        items = own.items
        if self._reads is not None:
            rank = dist.get_rank()
            received = {
                id(self._shared[read.number]) for read in self._reads if read.reader != rank
            }
            items = [item for item in items if id(item) not in received]
        return replace(own, items=items, storage_data=new_plan.storage_data)

    @contextmanager
    def passing_on(self) -> Iterator[None]:
        """Send to other ranks what the body has read, and receive what they have.

        Raises:
            DistributedError: a rank failed.
        """
        mine, self._reads = self._reads, None
        if mine is None:
            yield
            return
        with collective(None, _TIMEOUT) as traffic:
            yield
            items = self._shared
            pass_on(mine, lambda number: self.resolve_tensor(items[number]).detach(), traffic)
            for read in mine:
                if read.reader != traffic.rank:
                    item = items[read.number]
                    self.commit_tensor(item, self.resolve_tensor(item).detach())

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
