"""`FastStorageReader`: what `torch.distributed.checkpoint.load` reads from.

Reads stock's checkpoints and ours.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fastserial.checksums import check_crc, crc32, crc_mismatch
from fastserial.distributed.dcp.folder import METADATA, known_of, metadata_name
from fastserial.distributed.reading.part_reader import PartReader, ReadTarget
from fastserial.distributed.sharding.boxes import Box
from fastserial.distributed.sharding.file_index import FileTensor, Record
from fastserial.distributed.sharding.grid import grid_of
from fastserial.errors import (
    CheckpointReplacedError,
    CorruptCheckpointError,
    FastserialError,
    LoadMismatchError,
    UnreadableCheckpointError,
)
from fastserial.files.sources import FileStamp, stamp
from fastserial.formats.dcp import Known, is_framed
from fastserial.formats.outline import zip_outline
from fastserial.formats.source import BytesSource, DescriptorSource, Source
from fastserial.formats.tensors import contiguous_stride
from fastserial.formats.zip_format import (
    END,
    END_SIGNATURE,
    LOCAL_SIGNATURE,
    all_checksums,
    read_places,
    read_record,
)
from fastserial.interrupts import ours
from fastserial.loading.reader import FastFileReader, report_load
from fastserial.memory.held_settings import paused_collection

_EDGE = 4096  # bytes; more than any record of an item but the data of its tensor


# -- an item: an archive of `torch.save`, or bytes -------------------------------------------------


class ItemTensor(NamedTuple):
    """A tensor in an item.

    Attributes:
        start, nbytes: where its bytes are, counted from the item's first.
        dtype, shape, strides: of the tensor (elements).
        crc: CRC-32 of the bytes, None if it is unknown.
    """

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    crc: int | None


def tensor_in(
    item: Source, dtype: torch.dtype, shape: tuple[int, ...], known: Known | None
) -> ItemTensor | None:
    """Return the tensor in an item, None if only `torch.load` can read it.

    Args:
        item: its bytes.
        dtype, shape: of the tensor, as `.metadata` has them.
        known: what our writer added there.

    Raises:
        CorruptCheckpointError: what surrounds the data is damaged.
    """
    if known is None or known.start is None:
        return _parsed(item)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if known.start + nbytes > item.size:
        raise CorruptCheckpointError("it has fewer bytes than its shape needs")
    strides = known.strides or contiguous_stride(shape)
    return ItemTensor(known.start, nbytes, dtype, shape, strides, known.crc)


def _parsed(item: Source) -> ItemTensor | None:
    """Return the tensor of an archive if that is all it holds, and fills its storage."""
    if item.read_at(0, min(4, item.size)) != LOCAL_SIGNATURE:
        return None
    directory = read_places(item)
    found, order = zip_outline(item, directory), directory.find("byteorder")
    if found is None or len(found.tensors) != 1 or found.problems:
        return None
    (tensor,) = found.tensors
    record = directory.find(f"data/{tensor.storage}")
    dtype = getattr(torch, tensor.dtype, None)
    if (
        order is None
        or order.size != len("little")
        or record is None
        or not record.is_stored
        or (tensor.kind, tensor.key) != ("tensor", "")
        or tensor.span != (0, record.size)
        or tensor.nbytes != record.size
        or not isinstance(dtype, torch.dtype)
    ):
        return None
    for other in directory.records:
        if other is not record and other.size <= _EDGE and other.crc:
            check_crc(crc32(read_record(item, other, _EDGE)), other.crc, record=other.name)
    start, crc = record.data_offset, record.crc or None
    return ItemTensor(start, record.size, dtype, tensor.shape, tensor.stride, crc)


def check_archive(data: bytes) -> bool:
    """Compare the CRC-32s in an archive with its records; return whether all records have one.

    Raises:
        CorruptCheckpointError: one is wrong.
    """
    if not data.startswith(LOCAL_SIGNATURE) and data[-END.size :][:4] != END_SIGNATURE:
        return False
    source = BytesSource(data)
    directory = read_places(source, headers=True)
    for record in directory.records:
        if record.crc:
            check_crc(crc32(read_record(source, record, len(data))), record.crc, None, record.name)
    return all_checksums(directory)


# -- the items of a file ---------------------------------------------------------------------------


class WantedItem(NamedTuple):
    """An item that is to be read.

    Attributes:
        info: where it is, as `.metadata` has it.
        requests: of this rank for it.
        name: for errors.
        dtype, shape: of the tensor, as `.metadata` has them; None for bytes.
    """

    info: Any
    requests: list[ReadItem]
    name: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]


class ShardReader:
    """Reads items of an open file.

    Attributes:
        all_verified: whether all items were compared with a checksum.
        odd: requests for items that only torch can load; they are left to stock's reader.
    """

    def __init__(
        self,
        reader: FastFileReader,
        planner: LoadPlanner,
        verify: bool,
        between: Callable[[], None],
    ) -> None:
        """Read from `reader` for `planner`.

        Args:
            verify: compare the CRC-32 of each item.
            between: called now and then.
        """
        self.all_verified = verify
        self.odd: list[ReadItem] = []
        self._reader = reader
        self._planner = planner
        self._verify = verify
        self._between = between

    def read(self, items: Sequence[WantedItem]) -> None:
        """Read items, and pass them to the planner.

        Raises:
            CorruptCheckpointError: an item is damaged.
            OSError: the file cannot be read.
        """
        found: list[tuple[WantedItem, ItemTensor]] = []
        for wanted in sorted(items, key=lambda one: int(one.info.offset)):
            offset, length = wanted.info.offset, wanted.info.length
            if offset + length > self._reader.size:
                raise self._damaged(wanted, "the file ends before it does")
            source, known = DescriptorSource(self._reader.fd, offset, length), known_of(wanted.info)
            content: ItemTensor | None = None
            with self._naming(wanted):
                if wanted.dtype is not None:
                    content = tensor_in(source, wanted.dtype, wanted.shape, known)
            if content is not None:
                if not all(_is_within(request, content.shape) for request in wanted.requests):
                    raise self._damaged(wanted, "it is that of another checkpoint")
                found.append((wanted, content))
                continue
            data = source.read_at(0, length)
            if known is not None:
                self._check(wanted, crc32(data), known.crc)
            elif self._verify:
                with self._naming(wanted):
                    self.all_verified &= check_archive(data)
            if wanted.dtype is None:
                self._take_bytes(wanted, data)
            else:
                self.odd += wanted.requests
        with torch.no_grad():
            self._read_tensors(found)
        self._reader.check_unchanged()

    @contextlib.contextmanager
    def _naming(self, wanted: WantedItem) -> Iterator[None]:
        """Name item and file in an error of its archive."""
        try:
            yield
        except ours(UnreadableCheckpointError) as error:
            error.path, error.record = self._reader.name, wanted.name
            raise
        except ours(FastserialError) as error:
            text = error.message if isinstance(error, CorruptCheckpointError) else str(error)
            raise self._damaged(wanted, text) from error

    def _read_tensors(self, found: Sequence[tuple[WantedItem, ItemTensor]]) -> None:
        """Read tensors in one pass over the file, large ones directly into their targets."""
        targets: list[ReadTarget] = []
        records: list[Record] = []
        of_records: list[WantedItem] = []
        filled: list[tuple[ReadItem, torch.Tensor]] = []
        for wanted, content in found:
            start = wanted.info.offset + content.start
            stored = FileTensor(0, content.dtype, content.shape, content.strides, start)
            grid = grid_of(stored) if content.nbytes else None
            before = len(targets)
            for request in wanted.requests:
                box = Box(tuple(request.storage_offsets), tuple(request.lengths))
                target = self._target(request, box.sizes)
                filled.append((request, target))
                if grid is not None and box.numel:
                    targets.append(ReadTarget(grid, grid.box_of(box), target))
            if len(targets) == before:
                continue
            if self._verify and content.crc is not None:
                records.append(Record(wanted.name, start, content.nbytes, content.crc))
                of_records.append(wanted)
            else:
                self.all_verified = False
        parts = PartReader(self._reader, records, whole=True, between=self._between)
        parts.read_own(targets)
        whole = {
            piece.record: piece.crc
            for piece in parts.ledger.pieces()
            if piece.length == records[piece.record].nbytes
        }
        for number, wanted in enumerate(of_records):
            self._check(wanted, whole.get(number), records[number].crc)
        for request, target in filled:
            self._planner.commit_tensor(request, target)

    def _take_bytes(self, wanted: WantedItem, data: bytes) -> None:
        try:
            for request in wanted.requests:
                self._planner.load_bytes(request, io.BytesIO(data))
        except ours(Exception) as error:
            raise UnreadableCheckpointError(
                f"it cannot be loaded: {error}", path=self._reader.name, record=wanted.name
            ) from error

    def _target(self, request: ReadItem, shape: tuple[int, ...]) -> torch.Tensor:
        target = self._planner.resolve_tensor(request)
        if target.layout is torch.strided:  # `copy_` into a detached sparse one has no effect
            target = target.detach()
        if tuple(target.shape) != shape:
            raise LoadMismatchError(
                f"{request.dest_index.fqn} has the shape {tuple(target.shape)}, but {shape} in the "
                f"checkpoint {self._reader.name}"
            )
        return target

    def _check(self, wanted: WantedItem, crc: int | None, expected: int | None) -> None:
        if not self._verify or expected is None:
            self.all_verified = False
        elif (mismatch := crc_mismatch(crc, expected)) is not None:
            raise self._damaged(wanted, f"damaged: {mismatch}")

    def _damaged(self, wanted: WantedItem, text: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            text, path=self._reader.name, record=wanted.name, offset=wanted.info.offset
        )


def _is_within(request: ReadItem, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of this shape has what is requested of it."""
    offsets, lengths = request.storage_offsets, request.lengths
    return len(offsets) == len(shape) and all(
        at + length <= size for at, length, size in zip(offsets, lengths, shape, strict=True)
    )


REPLACED = "another save into this folder completed while it was loaded: load again"


class FastStorageReader(FileSystemReader):
    """The `storage_reader` of `dcp.load`.

        state = {"model": model.state_dict()}
        dcp.load(state, storage_reader=distributed.FastStorageReader("folder"))

    Reads folders of stock's writer as well.

    Attributes:
        between: called now and then while items are read.
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
        self.between: Callable[[], None] = lambda: None
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
        except ours(FileNotFoundError):
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

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan into the tensors that the planner resolves.

        Raises:
            CorruptCheckpointError: an item is damaged; the error names it and its file.
            CheckpointReplacedError: another save completed meanwhile.
            OSError: a file cannot be read.
        """
        try:
            self._read(plan.items, planner)
        except ours(FileNotFoundError) as error:
            if self._is_replaced():
                raise CheckpointReplacedError(errno.ENOENT, REPLACED, error.filename) from error
            raise
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, items: Sequence[ReadItem], planner: LoadPlanner) -> None:
        with paused_collection():
            files = self._by_file(items, planner)
        for file, wanted in files.items():
            began = perf_counter()
            with FastFileReader(os.path.join(self.path, file)) as reader:
                found = ShardReader(reader, planner, self._verify, self.between)
                with reader.translated(), paused_collection():
                    found.read(wanted)
                self.report(
                    counts=reader.blocks.counts,
                    config=reader.config,
                    path=reader.name,
                    container="dcp",
                    seconds=perf_counter() - began,
                    engine=reader.blocks.engine_name,
                    verified=found.all_verified,
                    fallback=reader.blocks.fallback,
                    transfer=reader.transfer,
                )
            for request in found.odd:
                self._read_by_stock(request, planner, reader.name)

    def report(self, **found: Any) -> None:
        """Publish what was read of a file: the arguments of `report_load`."""
        report_load(**found)

    def _read_by_stock(self, request: ReadItem, planner: LoadPlanner, file: str) -> None:
        try:
            super().read_data(LoadPlan([request]), planner).wait()
        except ours(Exception) as error:  # its text may say which class to allow
            text, name = f"torch does not load it: {error}", request.storage_index.fqn
            raise UnreadableCheckpointError(text, path=file, record=name) from error

    # -- the rest ------------------------------------------------------------------------------

    def _by_file(
        self, items: Sequence[ReadItem], planner: LoadPlanner
    ) -> dict[str, list[WantedItem]]:
        """Return the wanted items of each file. Stock reads those that went through extensions."""
        if self._metadata is None:
            raise ValueError("read_data was called before set_up_storage_reader")
        found: dict[MetadataIndex, WantedItem] = {}
        extended: list[ReadItem] = []
        for request in items:
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
