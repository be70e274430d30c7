"""`FastLoadPlanner`: each rank plans for itself, and nothing is sent for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fastserial.distributed.boxes import Box
from fastserial.distributed.dcp.local_rows import REPLICA, SHARD, kind_of, parts_of

__all__ = ["FastLoadPlanner"]

_KNOWN = {"flatten_state_dict", "flatten_sharded_tensors", "allow_partial_load"}


class FastLoadPlanner(DefaultLoadPlanner):
    """The `planner` of `dcp.load`. It takes the arguments of `DefaultLoadPlanner`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stock_rules = not set(kwargs) <= _KNOWN  # of a later torch: it knows what they mean
        self._own: LoadPlan | None = None
        self._views: dict[MetadataIndex, torch.Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        """Make this rank's plan, and keep it; an empty one is returned.

        Raises:
            RuntimeError: the checkpoint lacks a key.
            ValueError: a tensor has another shape there.
        """
        self._views = {}
        items = None if self._stock_rules else self._items()
        self._own = super().create_local_plan() if items is None else LoadPlan(items)
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return global_plan

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Return this rank's plan."""
        own, self._own = self._own, None
        if own is None:
            return super().finish_plan(new_plan)
        return replace(own, storage_data=new_plan.storage_data)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """Return the tensor that an index names."""
        view = self._views.get(index)
        return view if view is not None else super().lookup_tensor(index)

    def _items(self) -> list[ReadItem] | None:
        """Return what is to be read; None: torch has to say, as it does with old checkpoints."""
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
            shape = tuple(value.shape)
            boxes = [Box((0,) * len(shape), shape)]
        elif value.device_mesh.get_coordinate() is None:
            return []
        else:
            parts = parts_of(value, key, meshes)
            boxes = [box for box, _ in parts]
            for box, view in parts:
                self._views[MetadataIndex(key, box.offsets)] = view
        chunks = [
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes))
            for box in boxes
        ]
        return list(create_read_items_for_chunk_list(key, entry, chunks))


def _bytes_item(key: str) -> ReadItem:
    zero = torch.Size((0,))
    index = MetadataIndex(key)
    return ReadItem(LoadItemType.BYTE_IO, index, zero, index, zero, zero)
