"""What is converted from a folder of torch.distributed.checkpoint: tensors over untouched memory.

Their bytes are fetched from the ranks' files while they are written.
"""

from __future__ import annotations

import ctypes
import io
import os
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fastserial.checkpoints.convert import FileMemory
from fastserial.distributed.dcp.item_layout import outermost_first
from fastserial.distributed.dcp.item_structure import ItemTensor, tensor_in
from fastserial.distributed.ranks.exchange import MemorySlice
from fastserial.distributed.sharding.boxes import Box, boxes_of_range, intersect, run_of
from fastserial.errors import ConvertError, CorruptCheckpointError, UnreadableCheckpointError
from fastserial.files.sources import FileStamp, stamp
from fastserial.formats.container import FolderContainer
from fastserial.formats.dcp import Item, Metadata, Stored
from fastserial.formats.pickles import refuse_nested
from fastserial.formats.source import read_exactly
from fastserial.formats.tensors import contiguous_stride
from fastserial.formats.zip_format import PICKLE
from fastserial.interrupts import Descriptors, finish
from fastserial.memory.storages import Memory
from fastserial.memory.untouched import Untouched


class StoredChunk(NamedTuple):
    """A part of a tensor in a file.

    Attributes:
        memory: its bytes.
        box: which part; a last dimension counts the bytes of an element.
        strides: in which order its elements lie there, None: in their own.
    """

    memory: Memory
    box: Box
    strides: tuple[int, ...] | None = None


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
    offsets = [first - base for first, base in zip(part.offsets, filed.box.offsets, strict=True)]
    sizes = list(part.sizes)
    shape = list(filed.box.sizes)
    if filed.strides is not None:
        order = [*outermost_first(filed.strides), len(shape) - 1]
        offsets, sizes = [offsets[dim] for dim in order], [sizes[dim] for dim in order]
        shape = [shape[dim] for dim in order]
        target = target.permute(order)
    _read_box(filed, shape, Box(tuple(offsets), tuple(sizes)), target)


def _read_box(filed: StoredChunk, shape: list[int], box: Box, target: torch.Tensor) -> None:
    run = run_of(shape, box)
    if run is None:
        dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
        for index in range(box.sizes[dim]):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim] += index
            sizes[dim] = 1
            one = Box(tuple(offsets), tuple(sizes))
            _read_box(filed, shape, one, target.narrow(dim, index, 1))
        return
    first, stop = run
    if target.is_contiguous():
        filed.memory.copy_to(target.data_ptr(), first, stop - first)
        return
    scratch = torch.empty(box.sizes, dtype=torch.uint8, device="cpu")
    filed.memory.copy_to(scratch.data_ptr(), first, stop - first)
    target.copy_(scratch)


class FolderSource:
    """A folder, whose state is made without its tensors' bytes."""

    def __init__(self, path: str) -> None:
        """Open a folder.

        Raises:
            ConvertError: a value needs more than `weights_only` allows, an item went through an
                extension of stock's writer, or each rank saved a checkpoint of its own.
            CorruptCheckpointError: it is damaged, or no save was completed.
            OSError: it cannot be read.
        """
        self.metadata: dict[str, str] = {}
        self._path = path
        self._files = Descriptors()
        self._opened: dict[str, tuple[int, FileStamp]] = {}
        self._untouched: Untouched | None = None
        self._memory: dict[int, Memory] = {}  # of the tensors, by the address of their storages
        try:
            found = FolderContainer(path).of_all_ranks()
            self.container = "dcp"
            self.value = self._state(found)
        except BaseException:
            self.close()
            raise

    def part_of(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> Memory | None:
        """Return the source of bytes of a storage, None if it has them itself."""
        found = self._memory.get(storage.data_ptr())
        if found is None or (start == 0 and nbytes == found.nbytes):
            return found
        return MemorySlice(found, start, nbytes)

    def in_order(self, tensor: torch.Tensor) -> Memory | None:
        """Return the source of a tensor's bytes, in the order of its elements."""
        return self._memory.get(tensor.untyped_storage().data_ptr())

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
            dtype = _dtype_of(key, stored)
            flat[key] = tensor = self._untouched.tensor(stored.shape, dtype)
            if tensor.numel():
                memory = ChunkedMemory((*stored.shape, dtype.itemsize), chunks[key])
                self._memory[tensor.data_ptr()] = memory
        for key in found.values:
            flat[key] = self._value(items[key][0])
        order = [*found.paths, *flat]
        ordered = {key: flat[key] for key in dict.fromkeys(order) if key in flat}
        self._warn_of_text(found)
        return _nested(ordered, found.paths)

    def _warn_of_text(self, found: Metadata) -> None:
        """Warn of keys that may have been integers: no optimizer takes its state without them."""
        text = [
            key
            for key, path in found.paths.items()
            if any(type(part) is str and part.isdecimal() for part in path)
        ]
        if text:
            more = f" and {len(text) - 1} more" if len(text) > 1 else ""
            warnings.warn(
                f"{self._path}: numbers among the keys of {text[0]!r}{more} are text, as "
                "torch.distributed.checkpoint saves them: if they were integers, as in an "
                "optimizer's state, make them so again before `load_state_dict`",
                stacklevel=5,
            )

    def _chunks(self, key: str, stored: Stored, items: list[Item]) -> list[StoredChunk]:
        """Return where the bytes of a tensor are."""
        dtype = _dtype_of(key, stored)
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
        plain = content.strides == contiguous_stride(chunk.sizes)
        memory = FileMemory(fd, item.offset + content.start, nbytes)
        return StoredChunk(memory, box, None if plain else content.strides)

    def _content(self, fd: int, item: Item, dtype: torch.dtype) -> ItemTensor | None:
        if item.is_extended:
            raise ConvertError(
                f"entry {item.name!r} went through an extension: load it with dcp.load"
            )
        shape = item.chunk.sizes if item.chunk is not None else ()

        def peek(first: int, count: int) -> bytes:
            return os.pread(fd, min(count, item.length - first), item.offset + first)

        try:
            found = tensor_in(peek, item.length, dtype, shape, item.known)
        except CorruptCheckpointError as error:
            raise self._damaged(item.name, error.message) from error
        except UnreadableCheckpointError as error:
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

    def _value(self, item: Item) -> Any:
        if item.is_extended:
            raise ConvertError(
                f"entry {item.name!r} went through an extension: load it with dcp.load"
            )
        data = read_exactly(self._open(item), item.offset, item.length)
        try:
            refuse_nested(torch._C.PyTorchFileReader(io.BytesIO(data)).get_record(PICKLE))
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            what = str(error).partition("\n")[0]
            raise ConvertError(
                f"entry {item.name!r} cannot be loaded under the rules of weights_only: {what}"
            ) from error

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


def _dtype_of(key: str, stored: Stored) -> torch.dtype:
    found = getattr(torch, stored.dtype, None)
    if not isinstance(found, torch.dtype):
        raise ConvertError(f"entry {key!r}: this torch has no dtype {stored.dtype}")
    return found


def _nbytes(key: str, stored: Stored) -> int:
    return int(torch.Size(stored.shape).numel()) * _dtype_of(key, stored).itemsize


def _nested(flat: dict[str, Any], paths: dict[str, tuple[str | int, ...]]) -> Any:
    """Return the nest of dictionaries and lists in which values were before they were flattened.

    Raises:
        ConvertError: two of them have one path.
    """
    root: dict[Any, Any] = {}
    for key, value in flat.items():
        path = paths.get(key, (key,))
        inside: Any = root
        for part, following in zip(path, (*path[1:], None), strict=True):
            new: Any = value
            if following is not None:
                new = _at(inside, part)
                if new is None:
                    new = [] if type(following) is int else {}
            inside = _put(inside, part, new, key)
    return root


def _at(inside: Any, part: str | int) -> Any:
    if isinstance(inside, list):
        return inside[part] if type(part) is int and part < len(inside) else None
    return inside.get(part) if isinstance(inside, dict) else None


def _put(inside: Any, part: str | int, new: Any, key: str) -> Any:
    if isinstance(inside, list) and type(part) is int:
        inside.extend([None] * (part + 1 - len(inside)))
    elif not isinstance(inside, dict):
        raise ConvertError(f"entry {key!r}: what is around it is a value of its own")
    inside[part] = new
    return new
