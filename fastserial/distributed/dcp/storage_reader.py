"""`FastStorageReader`: what `torch.distributed.checkpoint.load` reads from.

Reads stock's checkpoints and ours.
"""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fastserial.distributed.dcp.folder import METADATA, metadata_name
from fastserial.distributed.dcp.item_structure import ItemParser
from fastserial.distributed.dcp.shard_reader import ShardReader, WantedItem
from fastserial.errors import CheckpointReplacedError, CorruptCheckpointError
from fastserial.files.sources import FileStamp, stamp
from fastserial.formats.dcp import is_framed
from fastserial.loading.reader import FastFileReader, report_load
from fastserial.memory.held_settings import paused_collection

__all__ = ["FastStorageReader"]


_REPLACED = "another save into this folder completed while it was loaded: load again"


class _PassesOn:
    """Tells a planner that `read_data` lets it send on what was read."""

    passes_on = True


class FastStorageReader(FileSystemReader):
    """The `storage_reader` of `dcp.load`.

        state = {"model": model.state_dict()}
        dcp.load(state, storage_reader=distributed.FastStorageReader("folder"))

    Reads folders of stock's writer as well.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True, **stock: Any) -> None:
        """Prepare to load from a folder.

        Args:
            path: of the folder.
            verify: compare the CRC-32 of each item that is read. Then a tensor of which a part is
                wanted is read as a whole.
            stock: other arguments of `FileSystemReader` (`_extension_registry`).
        """
        super().__init__(path, **stock)
        self._verify = verify
        self._metadata: Metadata | None = None
        self._tensors: dict[tuple[str, Any], tuple[torch.dtype, tuple[int, ...]]] = {}
        self._seen: tuple[str, FileStamp] | None = None  # path of `.metadata`, and its state

    # -- called by torch.distributed.checkpoint ------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start another load, from another folder if one is given."""
        super().reset(checkpoint_id)
        self._metadata = None
        self._seen = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what is in the checkpoint.

        Raises:
            CorruptCheckpointError: `.metadata` is damaged.
            OSError: it cannot be read.
        """
        rank = kwargs.get("rank")
        if rank is not None and os.path.exists(os.path.join(self.path, METADATA)):
            # After any error with the common file, DCP reads the rank's own. A damaged common file
            # must not lead to an older checkpoint
            self._read_metadata()
        return self._read_metadata(*args, **kwargs)

    def _read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = os.path.join(self.path, metadata_name(kwargs.get("rank")))
        with open(path, "rb") as file:
            self._seen = path, stamp(file.fileno())
            is_framed(file.read(), path)
        with paused_collection():
            return super().read_metadata(*args, **kwargs)

    def _is_replaced(self) -> bool:
        """Return whether `.metadata` was replaced since it was read."""
        if self._seen is None:  # the program got the metadata elsewhere
            return False
        path, before = self._seen
        try:
            with open(path, "rb") as file:
                return not before.holds_for(file.fileno())
        except FileNotFoundError:
            return True

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the metadata of the checkpoint."""
        self._metadata = metadata
        self._tensors = {
            (key, chunk.offsets): (entry.properties.dtype, tuple(chunk.sizes))
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan, marked so that planners may leave out what other ranks read."""
        return replace(plan, storage_data=_PassesOn())

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan into the tensors that the planner resolves.

        Raises:
            CorruptCheckpointError: an item is damaged; the error names it and its file.
            CheckpointReplacedError: another save completed meanwhile.
            OSError: a file cannot be read.
        """
        passing_on = getattr(planner, "passing_on", nullcontext)
        try:
            with passing_on():
                self._read(plan, planner)
        except FileNotFoundError as error:
            if self._is_replaced():
                raise CheckpointReplacedError(errno.ENOENT, _REPLACED, error.filename) from error
            raise
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        parser = ItemParser()
        with paused_collection():
            files = self._by_file(plan, planner)
        for file, items in files.items():
            began = perf_counter()
            with FastFileReader(os.path.join(self.path, file)) as reader:
                found = ShardReader(reader, planner, self._verify, parser)
                with reader.translated(), paused_collection():
                    found.read(items)
                report_load(
                    reader.blocks.counts,
                    reader.config,
                    path=reader.name,
                    container="dcp",
                    seconds=perf_counter() - began,
                    engine=reader.blocks.engine_name,
                    verified=found.all_verified,
                    fallback=reader.blocks.fallback,
                    transfer=reader.transfer,
                )

    # -- the rest ------------------------------------------------------------------------------

    def _by_file(self, plan: LoadPlan, planner: LoadPlanner) -> dict[str, list[WantedItem]]:
        """Return the wanted items of each file. Stock reads those that went through extensions."""
        if self._metadata is None:
            raise ValueError("read_data was called before set_up_storage_reader")
        found: dict[MetadataIndex, WantedItem] = {}
        extended: list[ReadItem] = []
        for request in plan.items:
            index = request.storage_index
            info = self._metadata.storage_data[index]
            if getattr(info, "transform_descriptors", None):
                extended.append(request)
            elif index in found:
                found[index].requests.append(request)
            else:
                found[index] = self._wanted(request, info)
        if extended:
            super().read_data(LoadPlan(extended), planner).wait()
        files: dict[str, list[WantedItem]] = {}
        for wanted in found.values():
            files.setdefault(wanted.info.relative_path, []).append(wanted)
        return files

    def _wanted(self, request: ReadItem, info: Any) -> WantedItem:
        index = request.storage_index
        if request.type == LoadItemType.BYTE_IO:
            return WantedItem(info, [request], index.fqn, None, ())
        name = index.fqn
        if any(index.offset or ()):
            name = f"{name} at {list(index.offset or ())}"
        found = self._tensors.get((index.fqn, index.offset))
        if found is None:
            text = "`.metadata` has no such part of a tensor"
            raise CorruptCheckpointError(text, path=str(self.path), record=name)
        return WantedItem(info, [request], name, *found)
