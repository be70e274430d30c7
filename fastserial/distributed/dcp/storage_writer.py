"""`FastStorageWriter`: what `torch.distributed.checkpoint.save` writes to, at disk speed.

Each rank's items go into one new file, in batched direct I/O. The checkpoint that was in the folder
stays whole until the new one is: `.metadata` is replaced at the end, by one rename.
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from fastserial.config import current
from fastserial.config.performance import SCATTERED_CHUNK
from fastserial.distributed.dcp.folder import ShardFolder, encoded, metadata_name
from fastserial.distributed.dcp.planners import FastSavePlanner
from fastserial.distributed.dcp.shard_layout import ShardLayout
from fastserial.distributed.dcp.staging import staged
from fastserial.errors import write_error
from fastserial.files.durable import make_folder, replace_bytes
from fastserial.files.paths import absolute
from fastserial.formats.dcp import METADATA
from fastserial.memory.held_settings import paused_collection
from fastserial.memory.storages import synchronize
from fastserial.saving.writer import FastFileWriter

_RESOLVING = ("finish_plan", "resolve_data", "lookup_object", "transform_object")
_VERSION = "1.0.0"  # of the layout of `.metadata`, as stock counts it
_HAS_COMMON = (
    "the folder has a checkpoint of all ranks, which would be loaded instead of those of single "
    "ranks (use_collectives=False): save into another folder, or remove this file first"
)


class FastStorageWriter(StorageWriter, AsyncStager):
    """The `storage_writer` of `dcp.save` and `dcp.async_save`.

        dcp.save(
            {"model": model.state_dict()},
            storage_writer=distributed.FastStorageWriter("folder"),
            planner=distributed.FastSavePlanner(),
        )

    Every rank writes one file of the folder; what was in the folder stays whole until then.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = True,
    ) -> None:
        """Prepare to save to a folder; it is created if it does not exist.

        Args:
            path: of the folder.
            overwrite: replace a checkpoint that is in the folder; otherwise it is an error.
        """
        super().__init__()
        self.path = os.fspath(path)
        self._folder = absolute(self.path)
        self._is_staged = False
        self.overwrite = overwrite
        self.save_id = str(uuid.uuid4())
        self._alone: int | None = None  # the rank, if each one completes its own checkpoint
        self._is_coordinator = True
        self._durable = True

    # -- called by torch.distributed.checkpoint ------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start another save, in another folder if one is given."""
        if checkpoint_id:
            self.path = os.fspath(checkpoint_id)
            self._is_staged = False
        self.save_id = str(uuid.uuid4())

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Take this rank's role in the save."""
        if not self._is_staged:  # else `stage` did, when the program called
            self._folder = absolute(self.path)
        self._is_staged = False
        self._is_coordinator = is_coordinator
        rank = kwargs.get("rank")
        self._alone = None if kwargs.get("use_collectives", True) else rank
        self._durable = current().durable

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Create the folder, and remove the files of failed saves.

        Raises:
            WriteError: the folder cannot be created, or has a checkpoint that must not be replaced,
                or one of all ranks where each rank is to have its own.
        """
        make_folder(self._folder, self._durable)
        folder = ShardFolder(self._folder)
        if self._alone is not None and folder.has(METADATA):
            # It would be loaded instead of what is saved now, and must not be removed: no rank
            # knows when all others have ended; until then it is the only whole checkpoint.
            raise write_error(errno.EEXIST, os.path.join(self.path, METADATA), _HAS_COMMON)
        if not self.overwrite and folder.has(metadata_name(0 if self._alone is not None else None)):
            text = "Checkpoint already exists, and overwrite=False"  # as stock says it
            raise write_error(errno.EEXIST, self.path, text)
        if self._alone is not None:
            folder.sweep(self._alone)
            return replace(plan, storage_data=_prefix(self._alone))
        if self._is_coordinator:
            folder.sweep(None)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank the prefix of its files' names."""
        return [
            plan if plan.storage_data is not None else replace(plan, storage_data=_prefix(rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items.

        Raises:
            WriteError: the disk is full or failed; the new file is removed.
        """
        future: Future[list[WriteResult]] = Future()
        future.set_result(_Results(self._write(plan, planner)))
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Complete the checkpoint: it replaces the previous one in the folder.

        Raises:
            WriteError: `.metadata` cannot be written; the previous checkpoint is intact.
        """
        metadata.version = _VERSION
        with paused_collection():
            metadata.storage_data = {
                result.index: result.storage_data for found in results for result in found
            }
        metadata.storage_meta = self.storage_meta()
        name = metadata_name(self._alone)
        replace_bytes(os.path.join(self._folder, name), encoded(metadata), self._durable)
        folder = ShardFolder(self._folder)
        if self._alone is None:
            folder.drop_lone_metadata()
        folder.sweep(self._alone)

    def storage_meta(self) -> StorageMeta | None:
        """Return what identifies this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    @property
    def checkpoint_id(self) -> str:
        """The folder."""
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether a checkpoint can be saved there."""
        return bool(FileSystemWriter.validate_checkpoint_id(checkpoint_id))

    # -- called by `async_save` ----------------------------------------------------------------

    @property
    def should_synchronize_after_execute(self) -> bool:
        """False: `stage` returns when all is copied."""
        return False

    def stage(self, state_dict: Any) -> Any:
        """Return a copy of a state on the host, which later steps do not change."""
        self._folder, self._is_staged = absolute(self.path), True
        return staged(state_dict)

    def synchronize_staging(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: nothing is kept between saves."""

    # -- the rest ------------------------------------------------------------------------------

    def _layout(self, name: str) -> ShardLayout:
        """Return an empty layout of a file."""
        return ShardLayout(name)

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        if not plan.items:
            return []
        name = ShardFolder(self._folder).new_shard(plan.storage_data.prefix)
        layout = self._layout(name)
        # Other planners may make copies of another dtype, or change items after the metadata.
        kinds = type(planner), DefaultSavePlanner, FastSavePlanner
        known = [[getattr(kind, name, None) for kind in kinds] for name in _RESOLVING]
        as_planned = all(own in others for own, *others in known)
        with FastFileWriter(os.path.join(self._folder, name), container="dcp") as out:
            for items in _groups(plan.items, as_planned):
                with paused_collection():
                    for item in items:
                        layout.add(item, planner.resolve_data(item), as_planned)
                    batch = layout.take()
                synchronize(batch.storages)
                out.write_layout(batch.extents, batch.nbytes, batch.sums.ledger)
                out.release_sources()
        with paused_collection():
            return layout.results()


class _Results(list[WriteResult]):
    """A rank's results. While torch has them, Python's garbage collector is paused.

    torch gathers them on rank 0, and then sends all metadata to every rank: some 100,000 objects,
    for 3,000 tensors of 4 ranks. Several full collections would take longer than that.
    """

    def __init__(self, results: list[WriteResult]) -> None:
        super().__init__(results)
        self._pause = paused_collection()
        self._pause.begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)


def _prefix(rank: int) -> _StoragePrefix:
    return _StoragePrefix(f"__{rank}_")


def _groups(items: list[WriteItem], at_once: bool) -> Iterator[list[WriteItem]]:
    """Yield the items in stock's order: all at once, or so few that memory holds their copies."""
    ordered = [item for item in items if item.type == WriteItemType.BYTE_IO]
    ordered += [item for item in items if item.type != WriteItemType.BYTE_IO]
    if at_once:
        yield ordered
        return
    group: list[WriteItem] = []
    nbytes = 0
    for item in ordered:
        group.append(item)
        planned = item.tensor_data
        if planned is not None:
            nbytes += torch.Size(planned.chunk.sizes).numel() * planned.properties.dtype.itemsize
        if nbytes >= SCATTERED_CHUNK:
            yield group
            group, nbytes = [], 0
    if group:
        yield group
