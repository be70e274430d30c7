"""`FastSavePlanner`: equal bytes for all ranks, and no planning while nothing changes."""

from __future__ import annotations

import contextlib
import io
import pickle
import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from fastserial.config import current
from fastserial.distributed.boxes import Box
from fastserial.distributed.copies import checksums, differing, ranks_in_words
from fastserial.distributed.dcp.deferred_metadata import deferred
from fastserial.distributed.dcp.fingerprint import fingerprint
from fastserial.distributed.dcp.flattening import flattened
from fastserial.distributed.dcp.global_plan import Told, global_plan, stock_owners, told_of
from fastserial.distributed.dcp.kept_plans import Kept, kept_with
from fastserial.distributed.dcp.local_rows import (
    OTHER,
    REPLICA,
    SHARD,
    LocalRows,
    Part,
    kind_of,
    parts_of,
)
from fastserial.distributed.pieces import oddity
from fastserial.errors import UnknownPlacementError
from fastserial.memory.held_settings import paused_collection

__all__ = ["FastSavePlanner"]

_PLANNING = ("create_local_plan", "create_global_plan", "finish_plan", "lookup_object")


class _AsBefore(NamedTuple):
    """Instead of rows: those of any plan with these numbers. Instead of parts: of the only one.

    The checksums are as in `Told`.
    """

    numbers: tuple[int, ...]
    sums: Sequence[int] = ()


class _Orders(NamedTuple):
    """What a rank is to write, and the number of the plan."""

    number: int
    parts: list[Part]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle columns: a third of the time that so many parts take."""
        return _from_columns, (self.number, list(zip(*self.parts, strict=True)))


def _from_columns(number: int, columns: list[Any]) -> _Orders:
    return _Orders(number, list(map(Part._make, zip(*columns, strict=True))))


@dataclass(slots=True)
class _Own:
    """A plan, as each rank keeps it."""

    fingerprint: list[Any]
    settings: Any
    told: Told
    replicas: list[str]
    items: list[WriteItem]


@dataclass(slots=True)
class _OfAll:
    """A plan, as the coordinator keeps it: who gets the metadata may change it, in any depth."""

    told: list[Told]
    replicas: list[list[str]]
    apart: dict[str, int]  # see `global_plan`
    keys: list[str]  # as they are: those of the index are the same objects, and pickled once
    entries: bytes
    paths: dict[str, Any] | None

    def metadata(self) -> Metadata:
        with paused_collection():
            entries = dict(zip(self.keys, pickle.loads(self.entries), strict=True))
        return Metadata(entries, planner_data=None if self.paths is None else dict(self.paths))


class FastSavePlanner(DefaultSavePlanner):
    """The `planner` of `dcp.save`. It takes the arguments of `DefaultSavePlanner`.

    What several ranks have is written by each of them in equal parts; tensors from 1 MiB on are cut
    for that. Plain ones are compared in every save (option `compare`); of one that differs between
    ranks, that rank's is saved whose stock would save, with a warning.

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
        self._fingerprint: list[Any] | None = None
        self._told: Told | None = None
        self._replicas: list[str] = []
        self._kept: Kept[_Own] | None = None
        self._own: dict[int, _Own] = {}  # the plans that this rank asked for
        self._meshes: dict[int, tuple[int, ...]] = {}  # what is known of the meshes of this save

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is only for the save that was going on."""
        empty = {"_fingerprint": None, "_told": None, "_kept": None}
        return {**vars(self), **empty, "_own": {}, "_meshes": {}}

    @cached_property
    def _plans_as_stock(self) -> bool:
        kind = type(self)
        return any(getattr(kind, name) is not getattr(FastSavePlanner, name) for name in _PLANNING)

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Flatten the state.

        Raises:
            ValueError: two values get the same key.
        """
        if self._plans_as_stock or not self.flatten_state_dict:
            super().set_up_planner(state_dict, storage_meta, is_coordinator)
            return
        with paused_collection():
            values, self.mappings, sharded = flattened(state_dict)
        if sharded and self.flatten_sharded_tensors:
            values = _flatten_sharded_tensors(values)
        self.state_dict = values
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Return what this rank has, or that it is as before.

        Raises:
            LoadMismatchError: a placement cannot be saved: `Partial`, say.
        """
        if self._plans_as_stock:
            return super().create_local_plan()
        self._meshes = {}
        self._kept = kept = kept_with(_Own)
        if kept is not None and kept.asked:
            kept.clear()  # the last save failed before its plan was made
        last = kept.latest() if kept is not None else None
        with paused_collection():
            self._fingerprint = fingerprint(self.state_dict, last.fingerprint if last else None)
        self._own = self._as_before(kept)
        if kept is not None:
            kept.asked = bool(self._own)
        if self._own:
            self._replicas = next(iter(self._own.values())).replicas
            self.plan = SavePlan([], planner_data=_AsBefore(tuple(self._own), self._sums()))
            return self.plan
        mappings = self.mappings if self.flatten_state_dict else None
        with paused_collection():
            self._told = told_of(LocalRows.of(self.state_dict), mappings)
            if any(row.kind == OTHER for row in self._told.local.rows):
                self._fingerprint = None  # who knows when torch would plan otherwise
        self._replicas = self._told.local.replicas()
        self.plan = SavePlan([], planner_data=self._told._replace(sums=self._sums()))
        return self.plan

    def _sums(self) -> list[int]:
        """Return the checksums of the plain tensors that may be cut."""
        if not dist.is_initialized() or self.dedup_save_to_lowest_rank:
            return [0] * len(self._replicas)  # nothing is
        tensors = [self.state_dict[key] for key in self._replicas]
        plain = [one for one in tensors if oddity(one) is None]
        found = iter(checksums(plain, current().compare == "all"))
        return [next(found) if oddity(one) is None else 0 for one in tensors]

    def _as_before(self, kept: Kept[_Own] | None) -> dict[int, _Own]:
        """Return the plans for just such a state, by their numbers."""
        found: dict[int, _Own] = {}
        if kept is None or self._fingerprint is None:
            return found
        settings = self._settings()
        for number, own in kept.items():
            if own.fingerprint == self._fingerprint and own.settings == settings:
                own.fingerprint = self._fingerprint  # compared faster where objects are the same
                self._told = own.told
                found[number] = own
        return found

    def _settings(self) -> Any:
        """Return what decides the plan besides the tensors."""
        nested = dict(self.mappings) if self.flatten_state_dict else None
        return nested, self.dedup_save_to_lowest_rank, type(self)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return what each rank writes. On the coordinator.

        Raises:
            ValueError: the ranks' parts of a tensor do not make up the tensor, a rank goes by a
                plan that is not known here, or it has another kind of planner.
        """
        if self._plans_as_stock:
            for rank, plan in enumerate(all_plans):
                if isinstance(plan.planner_data, (Told, _AsBefore)):
                    raise ValueError(_other_planner(rank))
            return super().create_global_plan(all_plans)
        kept = kept_with(_OfAll, of_all=True)
        messages = [plan.planner_data for plan in all_plans]
        number = _number_of_all(messages)
        found = kept.get(number) if kept is not None and number is not None else None
        if found is not None and len(found.told) != len(all_plans):
            found = None
        told = found.told if found is not None else self._told_by_all(messages, kept)
        replicas = found.replicas if found else [one.local.replicas() for one in told]
        known = found.apart if found is not None else {}
        sums = [message.sums for message in messages]
        mixed = differing(
            [dict(zip(*one, strict=True)) for one in zip(replicas, sums, strict=True)]
        )
        answers: list[Any]
        if found is not None and number is not None and mixed.keys() <= known.keys():
            answers = [_AsBefore((number,))] * len(all_plans)
        else:
            apart = {**known, **(stock_owners(told, mixed.keys()) if mixed else {})}
            _warn(mixed, apart)
            with paused_collection():
                parts, metadata = global_plan(told, self.dedup_save_to_lowest_rank, apart)
                entries = metadata.state_dict_metadata
                pickled = pickle.dumps(list(entries.values()))
            paths = metadata.planner_data
            found = _OfAll(told, replicas, apart, list(entries), pickled, paths)
            number = secrets.randbits(62)
            if kept is not None:
                kept.put(number, found)
            answers = [_Orders(number, part) for part in parts]
        plans = [
            replace(plan, planner_data=answer)
            for plan, answer in zip(all_plans, answers, strict=True)
        ]
        self.metadata = deferred(found.metadata)
        return plans, self.metadata

    def _told_by_all(self, messages: list[Any], kept: Kept[_OfAll] | None) -> list[Told]:
        told: list[Told] = []
        for rank, message in enumerate(messages):
            if isinstance(message, Told):
                told.append(message)
                continue
            if not isinstance(message, _AsBefore):
                raise ValueError(_other_planner(rank))
            number = message.numbers[-1]
            found = kept.get(number) if kept is not None else None
            if found is not None and rank < len(found.told):
                told.append(found.told[rank])
            elif len(messages) == 1 and number in self._own:  # threads that save alone have many
                told.append(self._own[number].told)
            else:
                raise ValueError(f"the plan that rank {rank} goes by is not known here; save again")
        return told

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return what this rank writes.

        Raises:
            ValueError: the coordinator has another kind of planner.
        """
        if self._plans_as_stock:
            return super().finish_plan(new_plan)
        message, kept, asked = new_plan.planner_data, self._kept, self._own
        self._kept, self._own = None, {}
        if kept is not None:
            kept.asked = False
        if isinstance(message, _AsBefore) and message.numbers[0] in asked:
            items = asked[message.numbers[0]].items
            if kept is not None:
                kept.get(message.numbers[0])
        elif isinstance(message, _Orders) and self._told is not None:
            with paused_collection():
                items = self._told.local.items(message.parts)
            if kept is not None and self._fingerprint is not None:
                settings, replicas = self._settings(), self._replicas
                own = _Own(self._fingerprint, settings, self._told, replicas, items)
                kept.put(message.number, own)
        else:
            raise ValueError(_other_planner(None))
        self.plan = replace(new_plan, items=list(items), planner_data=self.mappings)
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


def _number_of_all(messages: list[Any]) -> int | None:
    """Return the latest plan that is right for all ranks, None if there is none."""
    if not all(isinstance(message, _AsBefore) for message in messages):
        return None
    common = set(messages[0].numbers).intersection(*(message.numbers for message in messages))
    return next((number for number in reversed(messages[0].numbers) if number in common), None)


def _warn(mixed: Mapping[str, list[int]], apart: Mapping[str, int]) -> None:
    if mixed:
        keys = list(mixed)
        more = f" and {len(keys) - 5} more" if len(keys) > 5 else ""
        text = (
            f"plain tensors of {ranks_in_words(mixed[keys[0]])} differ from the first rank's: "
            f"{', '.join(map(repr, keys[:5]))}{more}. Of {keys[0]!r} that of rank "
            f"{apart[keys[0]]} is saved, as by stock. Parts of one tensor have to be DTensors"
        )
        warnings.warn(text, UserWarning, stacklevel=3)


def _contains(box: Box, part: Box) -> bool:
    ends = zip(*box, *part, strict=True)
    return all(low <= first and first + count <= low + size for low, size, first, count in ends)
