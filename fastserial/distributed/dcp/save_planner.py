"""`FastSavePlanner`: equal bytes for all ranks, and no planning while nothing changes."""

from __future__ import annotations

import contextlib
import io
import pickle
import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from fastserial.config import current
from fastserial.distributed.dcp.entries import (
    OTHER,
    REPLICA,
    SHARD,
    Part,
    entries_of,
    kind_of,
    parts_of,
    replicas_of,
    same_key,
    write_items,
)
from fastserial.distributed.dcp.global_plan import Told, global_plan, told_of
from fastserial.distributed.dcp.metadata_file import SentMetadata
from fastserial.distributed.ranks.copies import checksums, differing, ranks_in_words
from fastserial.distributed.sharding.boxes import Box
from fastserial.distributed.sharding.pieces import oddity
from fastserial.distributed.state.facts import facts_of
from fastserial.errors import UnknownPlacementError
from fastserial.memory.held_settings import paused_collection

__all__ = ["FastSavePlanner"]

_MOST = 4  # plans that are kept
_PLANNING = ("create_local_plan", "create_global_plan", "finish_plan", "lookup_object")


class _Message(NamedTuple):
    """What a rank tells the coordinator.

    Attributes:
        numbers: of the kept plans that were made of just what it has.
        told: the pickle of what it has (`Told`).
        sums: checksums of its plain tensors that may be cut.
    """

    numbers: tuple[int, ...]
    told: bytes
    sums: dict[str, int]


class _Orders(NamedTuple):
    """The number of the plan, and what a rank is to write; None: what that plan says already."""

    number: int
    parts: list[Part] | None


@dataclass(frozen=True, slots=True)
class _Own:
    """What this rank has, and its part of a plan.

    Attributes:
        facts, settings: what decides the rest; of `None` it is not known.
        told, pickled: what it tells, and that as it is sent.
        replicas: see `replicas_of`.
        items: that it writes.
    """

    facts: list[Any] | None
    settings: Any
    told: Told
    pickled: bytes
    replicas: list[str]
    items: Sequence[WriteItem] = ()


class _Planned(NamedTuple):
    """A plan, as the coordinator keeps it: who gets the metadata may change it, in any depth.

    Attributes:
        number: of the plan, a random one.
        parts: what each rank writes.
        keys, entries: of the metadata; a pickle of the latter.
        paths: where in the nested state the keys are.
    """

    number: int
    parts: list[list[Part]]
    keys: list[str]
    entries: bytes
    paths: dict[str, Any] | None

    def metadata(self) -> Metadata:
        with paused_collection():
            entries = dict(zip(self.keys, pickle.loads(self.entries), strict=True))
        return SentMetadata(entries, planner_data=None if self.paths is None else dict(self.paths))


@lru_cache(maxsize=_MOST)
def _planned(told: tuple[bytes, ...], lowest: bool, apart: frozenset[str]) -> _Planned:
    """Return the plan of what all ranks tell, given as pickles; see `global_plan`."""
    with paused_collection():
        parts, metadata = global_plan(list(map(pickle.loads, told)), lowest, apart)
        entries = metadata.state_dict_metadata
        pickled = pickle.dumps(list(entries.values()))
    keys = list(map(same_key, entries))
    return _Planned(secrets.randbits(62), parts, keys, pickled, metadata.planner_data)


# Plans of this process by their numbers, those used last behind.
_own: dict[int, _Own] = {}


def _keep(number: int, own: _Own) -> None:
    """Keep a plan, or count it as new; other threads may do so, too."""
    _own.pop(number, None)
    _own[number] = own
    for oldest in list(_own)[:-_MOST]:
        _own.pop(oldest, None)


class FastSavePlanner(DefaultSavePlanner):
    """The `planner` of `dcp.save`. It takes the arguments of `DefaultSavePlanner`.

        writer = distributed.FastStorageWriter("folder")
        dcp.save({"step": 7}, storage_writer=writer, planner=distributed.FastSavePlanner())

    What several ranks have is written by each of them in equal parts; tensors from 1 MiB on are cut
    for that. Plain ones are compared in every save (option `compare`); of one that differs between
    ranks, the first rank's is saved, with a warning.

    A class derived from it that overrides what makes plans (`create_local_plan`,
    `create_global_plan`, `finish_plan`, `lookup_object`) gets those of `DefaultSavePlanner`: ours
    have no items before the end, share what they consist of, and are kept.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("enable_plan_caching", None)  # ours is always on
        super().__init__(*args, **kwargs)
        if self._plans_as_stock:
            text = f"{type(self).__name__} changes plans: they are those of DefaultSavePlanner"
            warnings.warn(text, UserWarning, stacklevel=2)
        self._mine: _Own | None = None  # what this rank has, while it is planned
        self._as_before: dict[int, _Own] = {}  # kept plans of just that, by their numbers
        self._meshes: dict[int, tuple[int, ...]] = {}  # what is known of the meshes of this save

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is only for the save that was going on."""
        return {**vars(self), "_mine": None, "_as_before": {}, "_meshes": {}}

    @cached_property
    def _plans_as_stock(self) -> bool:
        kind = type(self)
        return any(getattr(kind, name) is not getattr(FastSavePlanner, name) for name in _PLANNING)

    def create_local_plan(self) -> SavePlan:
        """Return what this rank has, or that it is as before.

        Raises:
            LoadMismatchError: a placement cannot be saved: `Partial`, say.
        """
        if self._plans_as_stock:
            return super().create_local_plan()
        self._meshes = {}
        with paused_collection():
            self._mine = mine = self._found()
        sums = self._sums(mine.replicas)
        numbers = tuple(self._as_before)
        self.plan = SavePlan([], planner_data=_Message(numbers, mine.pickled, sums))
        return self.plan

    def _found(self) -> _Own:
        """Return what this rank has, and find the plans of just that."""
        kept, settings = list(_own.items()), self._settings()
        state = self.state_dict
        found = facts_of(list(state), list(state.values()), others=True)
        self._as_before = {
            number: own
            for number, own in kept
            if found is not None and own.facts == found and own.settings == settings
        }
        if self._as_before:
            before = next(reversed(self._as_before.values()))
            return replace(before, facts=found)  # compared faster, of the same objects
        entries = entries_of(state)
        told = told_of(entries, self.mappings if self.flatten_state_dict else None)
        if any(entry.kind == OTHER for entry in entries.values()):
            found = None  # who knows when torch would plan otherwise
        return _Own(found, settings, told, pickle.dumps(told), replicas_of(entries))

    def _sums(self, replicas: Sequence[str]) -> dict[str, int]:
        """Return the checksums of the plain tensors that may be cut."""
        if not dist.is_initialized() or self.dedup_save_to_lowest_rank:
            return {}  # nothing is
        keys = [key for key in replicas if oddity(self.state_dict[key]) is None]
        tensors = [self.state_dict[key] for key in keys]
        return dict(zip(keys, checksums(tensors, current().compare == "all"), strict=True))

    def _settings(self) -> Any:
        """Return what decides the plan besides the tensors."""
        nested = dict(self.mappings) if self.flatten_state_dict else None
        return nested, self.dedup_save_to_lowest_rank, type(self)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return what each rank writes. On the coordinator.

        Raises:
            ValueError: the ranks' parts of a tensor do not make up the tensor, or a rank has
                another kind of planner.
        """
        if self._plans_as_stock:
            for rank, plan in enumerate(all_plans):
                if isinstance(plan.planner_data, _Message):
                    raise ValueError(_other_planner(rank))
            return super().create_global_plan(all_plans)
        for rank, plan in enumerate(all_plans):
            if not isinstance(plan.planner_data, _Message):
                raise ValueError(_other_planner(rank))
        messages: list[_Message] = [plan.planner_data for plan in all_plans]
        mixed = differing([message.sums for message in messages])
        texts = tuple(message.told for message in messages)
        planned = _planned(texts, self.dedup_save_to_lowest_rank, frozenset(mixed))
        known = all(planned.number in message.numbers for message in messages)
        if not known:
            _warn(mixed)
        plans = [
            replace(plan, planner_data=_Orders(planned.number, None if known else parts))
            for plan, parts in zip(all_plans, planned.parts, strict=True)
        ]
        self.metadata = planned.metadata()
        return plans, self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return what this rank writes.

        Raises:
            ValueError: the coordinator has another kind of planner.
        """
        if self._plans_as_stock:
            return super().finish_plan(new_plan)
        orders, mine, as_before = new_plan.planner_data, self._mine, self._as_before
        self._mine, self._as_before = None, {}
        if not isinstance(orders, _Orders) or mine is None:
            raise ValueError(_other_planner(None))
        if orders.parts is None:
            mine = replace(mine, items=as_before[orders.number].items)
        else:
            with paused_collection():
                mine = replace(mine, items=write_items(mine.told.entries, orders.parts))
        if mine.facts is not None:
            _keep(orders.number, mine)
        self.plan = replace(new_plan, items=list(mine.items), planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the tensor, or the part of one, or the bytes that an item is."""
        if self._plans_as_stock:
            return super().resolve_data(write_item)
        data = write_item.tensor_data
        value = self.state_dict.get(write_item.index.fqn)
        kind = kind_of(value)
        part: torch.Tensor | None = None
        if data is not None and kind in (REPLICA, SHARD) and isinstance(value, torch.Tensor):
            with contextlib.suppress(UnknownPlacementError):  # then torch made the plan
                part = self._part(write_item.index.fqn, kind, value, data.chunk)
        if part is None:
            found: torch.Tensor | io.BytesIO = super().resolve_data(write_item)
            return found
        return self.transform_object(write_item, part)  # type: ignore[no-any-return]

    def _part(self, key: str, kind: int, value: Any, chunk: ChunkStorageMetadata) -> torch.Tensor:
        """Return the part of a tensor that a chunk is."""
        with torch.no_grad():
            local: torch.Tensor = value if kind == REPLICA else value.to_local()
        if local.shape == chunk.sizes:  # all of it: parts of a shard are smaller
            return local
        wanted = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if kind == REPLICA:
            parts = [(Box((0,) * local.dim(), tuple(local.shape)), local)]
        else:
            parts = parts_of(value, key, self._meshes)
        for box, view in parts:
            if _contains(box, wanted):
                return view[wanted.slices(box)]
        raise ValueError(f"{key}: this rank has not the part {wanted}")


def _other_planner(rank: int | None) -> str:
    whose = "the coordinator" if rank is None else f"rank {rank}"
    return f"{whose} has another kind of planner; use FastSavePlanner on all ranks, or on none"


def _warn(mixed: Mapping[str, list[int]]) -> None:
    if mixed:
        keys = list(mixed)
        more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
        text = (
            f"plain tensors of {ranks_in_words(mixed[keys[0]])} differ from the first rank's, "
            f"which are saved: {', '.join(map(repr, keys[:5]))}{more}. Parts of one tensor have to "
            "be DTensors"
        )
        warnings.warn(text, UserWarning, stacklevel=3)


def _contains(box: Box, part: Box) -> bool:
    ends = zip(*box, *part, strict=True)
    return all(low <= first and first + count <= low + size for low, size, first, count in ends)
