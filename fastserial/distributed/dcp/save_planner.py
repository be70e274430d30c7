"""`FastSavePlanner`: equal bytes for all ranks, and messages of few bytes."""

from __future__ import annotations

import contextlib
import io
import pickle
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from fastserial.config import current
from fastserial.distributed.dcp.planning import (
    REPLICA,
    SHARD,
    RankEntries,
    StateEntry,
    WritePart,
    entries_of,
    global_plan,
    kind_of,
    parts_of,
    replicas_of,
    whole_box,
    write_items,
)
from fastserial.distributed.ranks.copies import checksums, differing, ranks_in_words
from fastserial.distributed.sharding.boxes import Box
from fastserial.distributed.sharding.pieces import unloadable
from fastserial.distributed.state.facts import facts_of
from fastserial.errors import UnknownPlacementError
from fastserial.memory.held_settings import paused_collection

_PLANNING = ("create_local_plan", "create_global_plan", "finish_plan", "lookup_object")


class _FromRank(NamedTuple):
    """What a rank sends to the coordinator.

    Attributes:
        entries: a pickle of `RankEntries`.
        sums: checksums of the plain tensors that may be cut.
    """

    entries: bytes
    sums: dict[str, int]


class _ToRank(NamedTuple):
    """What the coordinator sends back: the parts that a rank is to write."""

    parts: list[WritePart]


class _OwnPlan(NamedTuple):
    """What this rank's last save was planned from, and what was made of it.

    Attributes:
        facts: what decides the entries; none of the state's tensors is kept.
        entries: what the rank has.
        message: a pickle of them.
        parts: that it writes.
        items: the same for torch.
    """

    facts: Any
    entries: dict[str, StateEntry]
    message: bytes
    parts: list[WritePart] | None = None
    items: list[WriteItem] = []  # noqa: RUF012 (never changed)


_last = _OwnPlan(None, {}, b"")  # replaced as a whole: several threads may save


@lru_cache(maxsize=4)
def _planned(
    entries: tuple[bytes, ...], lowest: bool, apart: frozenset[str]
) -> tuple[list[list[WritePart]], bytes]:
    """Return what each rank writes, and a pickle of the metadata, which its user may change.

    A plan is used again if all ranks have the entries that it was made for.
    """
    parts, metadata = global_plan([pickle.loads(one) for one in entries], lowest, apart)
    return parts, pickle.dumps(metadata)


class FastSavePlanner(DefaultSavePlanner):
    """The `planner` of `dcp.save`. It takes the arguments of `DefaultSavePlanner`.

        writer = distributed.FastStorageWriter("folder")
        dcp.save({"step": 7}, storage_writer=writer, planner=distributed.FastSavePlanner())

    What several ranks have is written by each of them in equal parts; tensors from 1 MiB on are cut
    for that. Plain ones are compared in every save (option `compare`); of one that differs between
    ranks, the first rank's is saved, with a warning.

    A class derived from it that overrides what makes plans (`create_local_plan`,
    `create_global_plan`, `finish_plan`, `lookup_object`) gets those of `DefaultSavePlanner`: ours
    have no items before the end, and share what they consist of.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("enable_plan_caching", None)  # ours is always on
        super().__init__(*args, **kwargs)
        if self._plans_as_stock:
            text = f"{type(self).__name__} changes plans: they are those of DefaultSavePlanner"
            warnings.warn(text, UserWarning, stacklevel=2)
        self._own: _OwnPlan | None = None  # of this rank, while the save is planned
        self._meshes: dict[int, tuple[int, ...]] = {}  # what is known of the meshes of this save

    @cached_property
    def _plans_as_stock(self) -> bool:
        kind = type(self)
        return any(getattr(kind, name) is not getattr(FastSavePlanner, name) for name in _PLANNING)

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
        message = _FromRank(own.message, self._sums(own.entries))
        self.plan = SavePlan([], planner_data=message)
        return self.plan

    def _own_plan(self) -> _OwnPlan:
        """Return what this rank has: the last save's entries, if nothing has changed."""
        state = self.state_dict
        paths = self.mappings if self.flatten_state_dict else None
        tensors = {key: one for key, one in state.items() if isinstance(one, torch.Tensor)}
        others = {key: kind_of(one) for key, one in state.items() if key not in tensors}
        facts: Any = facts_of(list(tensors), list(tensors.values()))
        if facts is not None:
            facts = [facts, others, paths]
            if facts == _last.facts:
                return _last
        entries = entries_of(state)
        return _OwnPlan(facts, entries, pickle.dumps(RankEntries.of(entries, paths)))

    def _sums(self, entries: Mapping[str, StateEntry]) -> dict[str, int]:
        """Return the checksums of the plain tensors that may be cut."""
        if not dist.is_initialized() or self.dedup_save_to_lowest_rank:
            return {}  # nothing is
        keys = [key for key in replicas_of(entries) if unloadable(self.state_dict[key]) is None]
        tensors = [self.state_dict[key] for key in keys]
        return dict(zip(keys, checksums(tensors, current().compare == "all"), strict=True))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return what each rank writes. On the coordinator.

        Raises:
            ValueError: the ranks' parts of a tensor do not make up the tensor, or a rank has
                another kind of planner.
        """
        messages: list[_FromRank] = [plan.planner_data for plan in all_plans]
        for rank, message in enumerate(messages):
            if isinstance(message, _FromRank) is self._plans_as_stock:
                raise _other_planner(f"rank {rank}")
        if self._plans_as_stock:
            return super().create_global_plan(all_plans)
        mixed = differing([message.sums for message in messages])
        texts = tuple(message.entries for message in messages)
        with paused_collection():
            parts, metadata = _planned(texts, self.dedup_save_to_lowest_rank, frozenset(mixed))
            self.metadata = pickle.loads(metadata)
        _warn(mixed)
        plans = [
            replace(plan, planner_data=_ToRank(mine))
            for plan, mine in zip(all_plans, parts, strict=True)
        ]
        return plans, self.metadata

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
        if own.parts != message.parts:
            with paused_collection():
                items = write_items(own.entries, message.parts)
            own = own._replace(parts=message.parts, items=items)
        _last = own
        self.plan = replace(new_plan, items=list(own.items), planner_data=self.mappings)
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
            parts = [(whole_box(local.shape), local)]
        else:
            parts = parts_of(value, key, self._meshes)
        for box, view in parts:
            if box.contains(wanted):
                return view[wanted.slices(box)]
        raise ValueError(f"{key}: this rank does not have the part {wanted}")


def _other_planner(whose: str) -> ValueError:
    return ValueError(
        f"{whose} has another kind of planner; use FastSavePlanner on all ranks, or on none"
    )


def _warn(mixed: Mapping[str, Sequence[int]]) -> None:
    if mixed:
        keys = list(mixed)
        more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
        text = (
            f"plain tensors of {ranks_in_words(mixed[keys[0]])} differ from the first rank's, "
            f"which are saved: {', '.join(map(repr, keys[:5]))}{more}. Parts of one tensor have to "
            "be DTensors"
        )
        warnings.warn(text, UserWarning, stacklevel=3)
