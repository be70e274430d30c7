"""Folders of torch.distributed.checkpoint as sources and targets of `convert`.

Both are streamed from file to file. The tensors of a folder lie over memory that is never touched:
their bytes are fetched from the ranks' files while they are written.
"""

from __future__ import annotations

import ctypes
import io
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from fastserial.checkpoints.convert import Converted, ConvertSource, FileMemory, part_of
from fastserial.checkpoints.tensor_read import direct_extent, read_tensor_into
from fastserial.config import Config, options
from fastserial.distributed.dcp.shard_layout import ShardLayout, TensorBytes, bytes_of
from fastserial.distributed.dcp.storage_reader import ItemTensor, check_archive, tensor_in
from fastserial.distributed.dcp.storage_writer import FastStorageWriter
from fastserial.distributed.sharding.boxes import Box, boxes_of_range, intersect
from fastserial.distributed.sharding.pieces import unloadable
from fastserial.errors import (
    CheckpointFileError,
    ConvertError,
    CorruptCheckpointError,
    UnreadableCheckpointError,
)
from fastserial.files.sources import FileStamp, stamp
from fastserial.formats.container import FolderContainer
from fastserial.formats.dcp import Item, Metadata, Stored
from fastserial.formats.outline import bounded_pickle
from fastserial.formats.source import BytesSource, DescriptorSource, read_exactly
from fastserial.formats.zip_format import PICKLE, read_places
from fastserial.interrupts import Descriptors, finish, finish_after, ours
from fastserial.loading.reader import HostSink, ReadExtent
from fastserial.memory.storages import HostMemory, Memory
from fastserial.memory.untouched import Untouched
from fastserial.patching.self_check import self_check

# -- a folder as a source --------------------------------------------------------------------------


class StoredChunk(NamedTuple):
    """A part of a tensor in a file.

    Attributes:
        memory: its bytes.
        box: which part; a last dimension counts the bytes of an element.
        strides: of these dimensions there (bytes).
    """

    memory: Memory
    box: Box
    strides: tuple[int, ...]


class ChunkedMemory:
    """A tensor's bytes in the order of its elements."""

    def __init__(self, shape: tuple[int, ...], parts: Sequence[StoredChunk]) -> None:
        """Keep where the parts are.

        Args:
            shape: of the tensor; a last dimension counts the bytes of an element.
        """
        self.nbytes = int(torch.Size(shape).numel())
        self._shape = shape
        self._parts = parts

    def copy_to(self, address: int, start: int, length: int) -> None:
        """Read bytes [start, start + length) into host memory at `address`.

        Raises:
            CorruptCheckpointError: no part has some of them.
        """
        if not length:
            return
        memory = (ctypes.c_uint8 * length).from_address(address)
        out = torch.frombuffer(memory, dtype=torch.uint8)
        at = found = 0
        for row in boxes_of_range(self._shape, start, start + length):
            view = out[at : at + row.numel].view(row.sizes)
            for filed in self._parts:
                part = intersect(row, filed.box)
                if part is not None:
                    _read(filed, part, view[part.slices(row)])
                    found += part.numel
            at += row.numel
        if found != length:
            raise CorruptCheckpointError("the parts of a tensor do not make it up")


def _read(filed: StoredChunk, part: Box, target: torch.Tensor) -> None:
    """Read a part of what is filed into a tensor of bytes."""
    sizes = filed.box.sizes
    whole = torch.empty_strided(sizes, filed.strides, dtype=torch.uint8, device="meta")
    view, reader = whole[part.slices(filed.box)], _MemoryReader(filed.memory)
    extent = direct_extent(0, view, target)
    if extent is not None:
        reader.read_into([extent])
    else:
        read_tensor_into(reader, 0, view, target)


class _MemoryReader:
    """Reads extents of a memory at once."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def read_into(self, extents: Sequence[ReadExtent]) -> None:
        for extent in extents:
            if isinstance(extent.sink, HostSink):
                self._memory.copy_to(extent.sink.address, extent.offset, extent.length)


class FolderFiles:
    """The files of a folder, opened as they are needed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._files = Descriptors()
        self._opened: dict[str, tuple[int, FileStamp]] = {}

    def data_of(self, item: Item) -> bytes:
        """Return the bytes of an item.

        Raises:
            CorruptCheckpointError: its file ends before it does.
            OSError: it cannot be read.
        """
        return read_exactly(self._open(item), item.offset, item.length)

    def value_of(self, item: Item, data: bytes) -> Any:
        """Return a value, given the bytes of its item.

        Raises:
            ConvertError: it needs more than `weights_only` allows, or went through an extension.
            CorruptCheckpointError: it is damaged.
        """
        if item.is_extended:
            raise ConvertError(
                f"entry {item.name!r} went through an extension: load it with dcp.load"
            )
        try:
            source = BytesSource(data)
            pickled = read_places(source).find(PICKLE)
            if pickled is not None:  # else torch says what is wrong
                bounded_pickle(source, pickled)
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except ours(Exception) as error:
            try:
                check_archive(data)
            except ours(CheckpointFileError) as damage:  # torch wrote no such archive
                raise self._damaged(item.name, damage.message) from error
            what = str(error).partition("\n")[0]
            raise ConvertError(
                f"entry {item.name!r} cannot be loaded under the rules of weights_only: {what}"
            ) from error

    def check_unchanged(self) -> None:
        """Raise if a file was written to, which no save does.

        Raises:
            CorruptCheckpointError: one was.
        """
        for name, (fd, before) in self._opened.items():
            if not before.holds_for(fd):
                path = os.path.join(self._path, name)
                raise CorruptCheckpointError("the file changed while it was read", path=path)

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _open(self, item: Item) -> int:
        found = self._opened.get(item.file)
        if found is None:
            if os.path.basename(item.file) != item.file:
                raise self._damaged(item.name, f"its file {item.file!r} is not in the folder")
            path = os.path.join(self._path, item.file)
            fd = self._files.open(path, os.O_RDONLY | os.O_NONBLOCK)
            found = self._opened[item.file] = fd, stamp(fd)
        fd, _ = found
        if item.offset + item.length > os.fstat(fd).st_size:
            raise self._damaged(item.name, f"{item.file} ends before it does")
        return fd

    def _damaged(self, record: str, message: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(message, path=self._path, record=record)


class FolderSource(FolderFiles):
    """A folder, whose state is made without its tensors' bytes."""

    def __init__(self, path: str) -> None:
        """Open a folder.

        Raises:
            ConvertError: a value needs more than `weights_only` allows, an item went through an
                extension of stock's writer, or each rank saved a checkpoint of its own.
            CorruptCheckpointError: it is damaged, or no save was completed.
            OSError: it cannot be read.
        """
        super().__init__(path)
        self.metadata: dict[str, str] = {}
        self._untouched: Untouched | None = None
        self._memory: dict[int, Memory] = {}  # of the tensors, by the address of their storages
        try:
            found = FolderContainer(path).of_all_ranks()
            self.container = "dcp"
            self.value = self._state(found)
        except BaseException as error:
            finish_after(error, self.close)
            raise

    def part_of(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> Memory | None:
        """Return the source of bytes of a storage, None if it has them itself."""
        return self._memory.get(storage.data_ptr())  # all of it: a tensor has one of its own

    def close(self) -> None:
        """Close the files; the tensors must not be used any more."""
        untouched, self._untouched = self._untouched, None
        finish(self._files.close, *([untouched.close] if untouched is not None else []))

    # -- the state -----------------------------------------------------------------------------

    def _state(self, found: Metadata) -> Any:
        items: dict[str, list[Item]] = {}
        for item in found.items:
            items.setdefault(item.key, []).append(item)
        if found.missing:
            raise self._damaged(found.missing[0], "`.metadata` does not say where it is")
        chunks = {
            key: self._chunks(key, stored, items.get(key, []))
            for key, stored in found.tensors.items()
        }
        nbytes = sum(_nbytes(key, stored) for key, stored in found.tensors.items())
        self._untouched = Untouched(nbytes, len(found.tensors))
        flat: dict[str, Any] = {}
        for key, stored in found.tensors.items():
            dtype = dtype_of(key, stored)
            flat[key] = tensor = self._untouched.tensor(stored.shape, dtype)
            if tensor.numel():
                memory = ChunkedMemory((*stored.shape, dtype.itemsize), chunks[key])
                self._memory[tensor.data_ptr()] = memory
        for key in found.values:
            item = items[key][0]
            flat[key] = self.value_of(item, self.data_of(item))
        self._paths = found.paths
        return nested(flat, found.paths)

    def warn_of_text(self) -> None:
        """Warn of keys that may have been integers: no optimizer takes its state without them."""
        text = [
            key
            for key, path in self._paths.items()
            if any(type(part) is str and part.isdecimal() for part in path)
        ]
        if text:
            more = f" and {len(text) - 1} more" if len(text) > 1 else ""
            warnings.warn(
                f"{self._path}: numbers among the keys of {text[0]!r}{more} are text, as "
                "torch.distributed.checkpoint saves them: if they were integers, as in an "
                "optimizer's state, make them so again before `load_state_dict`",
                stacklevel=4,
            )

    def _chunks(self, key: str, stored: Stored, items: list[Item]) -> list[StoredChunk]:
        """Return where the bytes of a tensor are."""
        dtype = dtype_of(key, stored)
        found = [self._filed(item, dtype) for item in items if item.nbytes]
        if sum(chunk.box.numel for chunk in found) != _nbytes(key, stored):
            raise self._damaged(key, "its parts do not make it up")
        return found

    def _filed(self, item: Item, dtype: torch.dtype) -> StoredChunk:
        fd = self._open(item)
        chunk = item.chunk
        content = self._content(fd, item, dtype)
        nbytes = item.nbytes or 0
        if chunk is None or content is None or content.nbytes != nbytes:
            raise ConvertError(
                f"entry {item.name!r}: only torch knows how it is saved: load it with dcp.load"
            )
        last = dtype.itemsize
        box = Box((*chunk.offsets, 0), (*chunk.sizes, last))
        strides = (*(step * last for step in content.strides), 1)
        return StoredChunk(FileMemory(fd, item.offset + content.start, nbytes), box, strides)

    def _content(self, fd: int, item: Item, dtype: torch.dtype) -> ItemTensor | None:
        if item.is_extended:
            raise ConvertError(
                f"entry {item.name!r} went through an extension: load it with dcp.load"
            )
        shape = item.chunk.sizes if item.chunk is not None else ()
        try:
            source = DescriptorSource(fd, item.offset, item.length)
            found = tensor_in(source, dtype, shape, item.known)
        except ours(CorruptCheckpointError) as error:
            raise self._damaged(item.name, error.message) from error
        except ours(UnreadableCheckpointError) as error:
            error.path, error.record = self._path, item.name
            raise
        if found is not None and found.shape == shape and found.dtype != dtype:
            raise ConvertError(  # what stock's `enable_plan_caching` makes of a new dtype
                f"entry {item.name!r} is of {found.dtype}, but `.metadata` says {dtype}: load it "
                "with dcp.load"
            )
        if found is not None and found.shape != shape:
            raise self._damaged(item.name, "it is that of another checkpoint")
        return found


def dtype_of(key: str, stored: Stored) -> torch.dtype:
    """Return the dtype of a tensor.

    Raises:
        ConvertError: this torch has none of the name.
    """
    found = getattr(torch, stored.dtype, None)
    if not isinstance(found, torch.dtype):
        raise ConvertError(f"entry {key!r}: this torch has no dtype {stored.dtype}")
    return found


def _nbytes(key: str, stored: Stored) -> int:
    return int(torch.Size(stored.shape).numel()) * dtype_of(key, stored).itemsize


def nested(found: dict[str, Any], paths: dict[str, tuple[str | int, ...]]) -> Any:
    """Return the nest of dictionaries and lists in which values were before they were flattened.

    Raises:
        ConvertError: two of them cannot be in one nest.
    """
    flat = {key: found[key] for key in dict.fromkeys([*paths, *found]) if key in found}
    places = {key: paths.get(key, (key,)) for key in flat}
    leaves = set(places.values())
    for key, path in places.items():
        if any(path[:length] in leaves for length in range(1, len(path))):
            raise ConvertError(f"entry {key!r} is in another entry that is a plain value")
    try:
        return unflatten_state_dict(flat, cast("Any", places))
    except ours(AttributeError, LookupError, TypeError) as error:
        raise ConvertError(f"{paths}: one of these is a list and a dictionary") from error


# -- a folder as a target --------------------------------------------------------------------------


class _StreamingWriter(FastStorageWriter):
    """Takes the bytes of tensors from an open source."""

    def __init__(self, path: str, source: ConvertSource) -> None:
        super().__init__(path)
        self._source = source

    def _layout(self, name: str) -> ShardLayout:
        return ShardLayout(name, self._bytes_of)

    def _bytes_of(self, tensor: torch.Tensor) -> TensorBytes | None:
        found = bytes_of(tensor)
        if found is None or not found.nbytes or not isinstance(found.memory, HostMemory):
            return found
        storage = tensor.untyped_storage()
        start = found.memory.address - storage.data_ptr()
        memory = self._source.part_of(storage, start, found.nbytes)
        return found if memory is None else found._replace(memory=memory)


def write_folder(
    source: ConvertSource, name: str, path: str, key: str, config: Config
) -> Converted:
    """Write what is under a key of an open source to a folder.

    What was in the folder stays whole until the new checkpoint is.

    Args:
        name: of the source.

    Raises:
        ConvertError: it is no dictionary, two of its entries get one key, a tensor has no bytes of
            its own, or this torch cannot be written for.
        CorruptCheckpointError: the source is damaged, or changed.
        WriteError: it cannot be written; what was there is intact.
    """
    value = part_of(source.value, key)
    if not isinstance(value, Mapping):
        raise ConvertError(f"a folder holds a dictionary, nothing of type {type(value).__name__}")
    reason = self_check()
    if reason is not None:
        raise ConvertError(f"this torch writes other archives than are known here: {reason}")
    with options(**_as_options(config)):
        writer = _StreamingWriter(path, source)
        planner = DefaultSavePlanner()
        writer.set_up_storage_writer(True, rank=0)
        try:
            planner.set_up_planner(
                cast("dict[str, Any]", value),
                storage_meta=writer.storage_meta(),
                is_coordinator=True,
            )
        except ours(ValueError) as error:  # says which key
            raise ConvertError(
                f"{name}: the keys of a folder are paths joined by dots, and two entries get the "
                f"same one ({error}): {_REMEDY}"
            ) from error
        _refuse_odd(planner.state_dict, name)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([plan])
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
        results = writer.write_data(plan, planner).wait()
        source.check_unchanged()
        writer.finish(metadata, [results])
    nbytes = sum(
        os.stat(os.path.join(path, name)).st_size
        for name in {result.storage_data.relative_path for result in results} | {".metadata"}
    )
    dropped = tuple(name for name in source.metadata if name != "format")
    return Converted(source.container, "dcp", nbytes, dropped)


_REMEDY = "leave it out with --key (key=), or convert to one file of torch"


def _refuse_odd(flat: Mapping[str, Any], name: str) -> None:
    """Raise if a tensor cannot be loaded from a folder.

    Raises:
        ConvertError: one cannot.
    """
    for key, tensor in flat.items():
        if isinstance(tensor, torch.Tensor) and (problem := unloadable(tensor)) is not None:
            raise ConvertError(
                f"{name}: entry {key!r} cannot be loaded from a folder: {problem}; {_REMEDY}"
            )


def _as_options(config: Config) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config)}
