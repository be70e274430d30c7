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
from fastserial.distributed.dcp.item_structure import Structures
from fastserial.distributed.dcp.shard_reader import ShardReader, Wanted
from fastserial.errors import CheckpointReplacedError, CorruptCheckpointError
from fastserial.files.sources import FileStamp, stamp
from fastserial.formats.dcp import is_framed
from fastserial.loading.reader import FastFileReader, report_load
from fastserial.memory.held_settings import paused_collection

__all__ = ["FastStorageReader"]


_REPLACED = "another save into this folder completed while it was loaded: load again"


class _TakesTurns:
    """Says that `read_data` lets a planner pass on what was read."""

    takes_turns = True


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
            verify: compare the CRC-32 of each item that is read. Then a tensor that is wanted in
                part is read as a whole.
            stock: what else `FileSystemReader` takes (`_extension_registry`).
        """
        super().__init__(path, **stock)
        self._verify = verify
        self._metadata: Metadata | None = None
        self._seen: tuple[str, FileStamp] | None = None  # path of `.metadata`, and what was there

    # -- what torch.distributed.checkpoint asks of a StorageReader -----------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another load, from another folder if one is given."""
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
            # DCP asks for a rank's own after any error with that of all ranks; a damaged one must
            # not end in an older checkpoint
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
        """Return whether `.metadata` is no longer the one that was read."""
        if self._seen is None:  # the program has it from elsewhere
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
        """Learn what is in the checkpoint."""
        self._metadata = metadata
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan, with the note that planners may leave out what other ranks read."""
        return replace(plan, storage_data=_TakesTurns())

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan wants into what the planner gives for it.

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
        structures = Structures()
        with paused_collection():
            files = self._by_file(plan, planner)
        for file, items in files.items():
            began = perf_counter()
            with FastFileReader(os.path.join(self.path, file)) as reader:
                found = ShardReader(reader, planner, self._verify, structures)
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

    def _by_file(self, plan: LoadPlan, planner: LoadPlanner) -> dict[str, list[Wanted]]:
        """Return what is wanted of each file; stock reads what went through its extensions."""
        if self._metadata is None:
            raise ValueError("read_data was called before set_up_storage_reader")
        places = self._metadata.storage_data
        found: dict[MetadataIndex, Wanted] = {}
        extended: list[ReadItem] = []
        for request in plan.items:
            index = request.storage_index
            place = places[index]
            if getattr(place, "transform_descriptors", None):
                extended.append(request)
            elif index in found:
                found[index].requests.append(request)
            else:
                found[index] = self._wanted(request, place)
        if extended:
            super().read_data(LoadPlan(extended), planner).wait()
        files: dict[str, list[Wanted]] = {}
        for wanted in found.values():
            files.setdefault(wanted.place.relative_path, []).append(wanted)
        return files

    def _wanted(self, request: ReadItem, place: Any) -> Wanted:
        index = request.storage_index
        if request.type == LoadItemType.BYTE_IO:
            return Wanted(place, [request], index.fqn, None, ())
        dtype, shape = self._stored(index)
        name = index.fqn
        if any(index.offset or ()):
            name = f"{name} at {list(index.offset or ())}"
        return Wanted(place, [request], name, dtype, shape)

    def _stored(self, index: MetadataIndex) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return dtype and shape of a chunk."""
        entries = self._metadata.state_dict_metadata if self._metadata is not None else {}
        entry = entries.get(index.fqn)
        if not isinstance(entry, TensorStorageMetadata):
            raise CorruptCheckpointError(
                "`.metadata` has no tensor", path=str(self.path), record=index.fqn
            )
        chunks, hint = entry.chunks, index.index
        if hint is not None and hint < len(chunks) and chunks[hint].offsets == index.offset:
            return entry.properties.dtype, tuple(chunks[hint].sizes)
        for chunk in chunks:
            if chunk.offsets == index.offset:
                return entry.properties.dtype, tuple(chunk.sizes)
        raise CorruptCheckpointError(
            f"`.metadata` has no chunk at {index.offset}", path=str(self.path), record=index.fqn
        )
