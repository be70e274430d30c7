"""`FastStorageReader`: what `torch.distributed.checkpoint.load` reads from.

Reads stock's checkpoints and ours.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fastserial.checkpoints.convert import name_of
from fastserial.checksums import crc_mismatch
from fastserial.config import current
from fastserial.distributed.dcp.folder import known_of, metadata_name
from fastserial.distributed.layout.boxes import Box
from fastserial.distributed.layout.file_index import FileTensor
from fastserial.distributed.layout.grid import Grid
from fastserial.distributed.load.files import StoredFiles
from fastserial.distributed.load.part_reader import PartReader, ReadTarget
from fastserial.distributed.load.reader import array_of, records_of
from fastserial.errors import (
    CorruptCheckpointError,
    LoadMismatchError,
    UnreadableCheckpointError,
)
from fastserial.files.sources import FileStamp, stamp
from fastserial.formats.dcp import METADATA, Known, is_framed
from fastserial.formats.stored import Chunk
from fastserial.interrupts import cleanup, ours
from fastserial.loading.reader import report_load
from fastserial.memory.held_settings import paused_collection


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
        self._tensors: dict[tuple[str, Any], tuple[str, tuple[int, ...]]] = {}
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

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take the metadata of the checkpoint."""
        self._metadata = metadata
        self._tensors = {
            (key, chunk.offsets): (name_of(entry.properties.dtype), tuple(chunk.sizes))
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
            for chunk in entry.chunks
        }
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan into the tensors that the planner resolves.

        Raises:
            CorruptCheckpointError: an item is damaged; the error names it and its file.
            CheckpointReplacedError: another save completed meanwhile.
            OSError: a file cannot be read.
        """
        files = StoredFiles(str(self.path), current())
        files.has_items, files.completed = True, self._seen
        files.names = list({self._info(one).relative_path: None for one in plan.items})
        with cleanup(files.close):
            self._read(plan.items, planner, files)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, items: Sequence[ReadItem], planner: LoadPlanner, files: StoredFiles) -> None:
        began = perf_counter()
        with paused_collection():
            by_file, extended = self._by_file(items)
        if extended:
            super().read_data(LoadPlan(extended), planner).wait()
        found = [self._read_file(wanted, planner, files) for wanted in by_file.values()]
        files.check_unchanged()
        report_load(
            **files.report(),
            config=files.config,
            path=files.path,
            container="dcp",
            seconds=perf_counter() - began,
            verified=self._verify and all(found),
        )

    def _read_file(
        self, wanted: Mapping[Chunk, list[ReadItem]], planner: LoadPlanner, files: StoredFiles
    ) -> bool:
        """Read items of one file in one pass; return whether all were compared with a checksum.

        What is no array is compared first.
        """
        verified = True
        arrays: list[tuple[Grid, list[ReadItem]]] = []
        for chunk, requests in sorted(wanted.items(), key=lambda one: one[0].offset):
            tensor = FileTensor(0, torch.uint8, chunk.elements.sizes, (chunk,))
            array = array_of(tensor, chunk, files) if chunk.box is not None else None
            if isinstance(array, Grid):
                arrays.append((array, requests))
                continue
            data = files.data_of(chunk)
            if chunk.nbytes != 0:
                verified &= self._verify and files.is_sound(chunk, data)
            for request in requests:
                self._read_odd(request, planner, files.path_of(chunk.file), data)
        with paused_collection(), torch.no_grad():
            return self._read_arrays(arrays, planner, files) and verified

    def _read_arrays(
        self,
        arrays: Sequence[tuple[Grid, list[ReadItem]]],
        planner: LoadPlanner,
        files: StoredFiles,
    ) -> bool:
        targets: list[ReadTarget] = []
        filled: list[tuple[ReadItem, torch.Tensor]] = []
        for grid, requests in arrays:
            for request in requests:
                starts = zip(grid.chunk.elements.offsets, request.storage_offsets, strict=True)
                box = Box(tuple(map(sum, starts)), tuple(request.lengths))
                target = _target(planner, request, box.sizes, files.path_of(grid.chunk.file))
                filled.append((request, target))
                if box.numel:
                    targets.append(ReadTarget(grid, grid.box_of(box), target))
        chunks = {grid.offset: grid.chunk for grid, _ in arrays}
        grids = {one.grid for one in targets if self._verify and one.grid.chunk.crc is not None}
        records = records_of(grids)
        parts = PartReader(files, records, whole=grids)
        parts.read_own(targets)
        whole = {(piece.record, piece.length): piece.crc for piece in parts.ledger.pieces()}
        for number, record in enumerate(records):
            mismatch = crc_mismatch(whole.get((number, record.nbytes)), record.crc)
            if mismatch is not None:
                raise files.damaged(chunks[record.offset], f"damaged: {mismatch}")
        for request, target in filled:
            planner.commit_tensor(request, target)
        return all(map(parts.checks, targets))

    def _read_odd(self, request: ReadItem, planner: LoadPlanner, path: str, data: bytes) -> None:
        """Pass a value on; let stock read a tensor that is no array."""
        try:
            if request.type == LoadItemType.BYTE_IO:
                planner.load_bytes(request, io.BytesIO(data))
            else:
                super().read_data(LoadPlan([request]), planner).wait()
        except ours(Exception) as error:  # its text may say which class to allow
            text, name = f"torch does not load it: {error}", request.storage_index.fqn
            raise UnreadableCheckpointError(text, path=path, record=name) from error

    # -- the rest ------------------------------------------------------------------------------

    def _info(self, request: ReadItem) -> Any:
        """Return where an item is, as `.metadata` has it."""
        if self._metadata is None:
            raise ValueError("read_data was called before set_up_storage_reader")
        return self._metadata.storage_data[request.storage_index]

    def _by_file(
        self, items: Sequence[ReadItem]
    ) -> tuple[dict[str, dict[Chunk, list[ReadItem]]], list[ReadItem]]:
        """Return what is wanted of each item of each file; and of items for an extension."""
        files: dict[str, dict[Chunk, list[ReadItem]]] = {}
        extended: list[ReadItem] = []
        for request in items:
            info = self._info(request)
            if getattr(info, "transform_descriptors", None):
                extended.append(request)
                continue
            inside = files.setdefault(info.relative_path, {})
            inside.setdefault(self._chunk(request, info), []).append(request)
        return files, extended

    def _chunk(self, request: ReadItem, info: Any) -> Chunk:
        """Return the item of which something is wanted."""
        index, box, dtype = request.storage_index, None, None
        start, crc, strides = known_of(info) or Known(None, None)
        if request.type != LoadItemType.BYTE_IO:
            if (index.fqn, index.offset) not in self._tensors:
                text = "`.metadata` has no such part of a tensor"
                raise CorruptCheckpointError(text, path=str(self.path), record=index.fqn)
            dtype, sizes = self._tensors[index.fqn, index.offset]
            box = Box(tuple(index.offset or ()), sizes)
        where = info.relative_path, info.offset, info.length
        return Chunk(box, dtype, *where, start, strides, crc, key=index.fqn)


def _target(
    planner: LoadPlanner, request: ReadItem, shape: tuple[int, ...], path: str
) -> torch.Tensor:
    target = planner.resolve_tensor(request)
    if target.layout is torch.strided:  # `copy_` into a detached sparse one has no effect
        target = target.detach()
    if tuple(target.shape) != shape:
        key, found = request.dest_index.fqn, tuple(target.shape)
        raise LoadMismatchError(f"{key} has the shape {found}, but {shape} in {path}")
    return target
