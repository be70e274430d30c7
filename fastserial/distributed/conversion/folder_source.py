"""What is converted from a folder of torch.distributed.checkpoint: tensors over untouched memory.

Their bytes are fetched from the ranks' files while they are written.
"""

from __future__ import annotations

import io
import os
import warnings
from typing import Any

import torch

from fastserial.checkpoints.streaming import FileMemory
from fastserial.distributed.conversion.assembled import AssembledTensors, ChunkedMemory, StoredChunk
from fastserial.distributed.dcp.item_structure import ItemParser, ItemTensor
from fastserial.distributed.sharding.boxes import Box
from fastserial.errors import ConvertError, CorruptCheckpointError, UnreadableCheckpointError
from fastserial.files.sources import FileStamp, stamp
from fastserial.formats.container import FolderContainer
from fastserial.formats.dcp import Item, Metadata, Stored
from fastserial.formats.pickles import refuse_nested
from fastserial.formats.source import read_exactly
from fastserial.formats.storages import contiguous_stride
from fastserial.formats.zip.records import PICKLE
from fastserial.interrupts import Descriptors, finish
from fastserial.memory.storages import Memory

__all__ = ["FolderSource"]


class FolderSource:
    """A folder, whose state is made without its tensors' bytes."""

    def __init__(self, path: str) -> None:
        """Open a folder.

        Raises:
            ConvertError: a value needs more than `weights_only` allows, an item went through an
                extension of stock's writer, or ranks have one key in checkpoints of their own.
            CorruptCheckpointError: it is damaged, or no save was completed.
            OSError: it cannot be read.
        """
        self.metadata: dict[str, str] = {}
        self._path = path
        self._files = Descriptors()
        self._opened: dict[str, tuple[int, FileStamp]] = {}
        self._made = AssembledTensors()
        self._parser = ItemParser()
        try:
            found = FolderContainer(path).joined()
            self.container = "dcp"
            self.value = self._state(found)
        except BaseException:
            self.close()
            raise

    def part_of(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> Memory | None:
        """Return where bytes of a storage come from, None if it has them itself."""
        return self._made.part_of(storage, start, nbytes)

    def in_order(self, tensor: torch.Tensor) -> Memory | None:
        """Return where the bytes of a tensor come from, in the order of its elements."""
        return self._made.in_order(tensor)

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
        finish(self._files.close, self._made.close)

    # -- the state -----------------------------------------------------------------------------

    def _state(self, found: Metadata) -> Any:
        items: dict[str, list[Item]] = {}
        for item in found.items:
            items.setdefault(item.key, []).append(item)
        if found.missing:
            raise self._damaged(found.missing[0], "`.metadata` does not tell its place")
        flat: dict[str, Any] = {}
        first = {key: keys[0] for keys in found.ties for key in keys[1:]}
        for key, stored in found.tensors.items():
            tied = flat.get(first.get(key, ""))
            same = found.tensors.get(first.get(key, ""))
            if tied is not None and same is not None and same[:2] == stored[:2]:
                flat[key] = tied.detach()
            else:
                flat[key] = self._tensor(key, stored, items.get(key, []))
        for key in found.values:
            flat[key] = self._value(items[key][0])
        order = [*found.paths, *flat]
        ordered = {key: flat[key] for key in dict.fromkeys(order) if key in flat}
        if found.numbers is None:
            self._warn_of_text(found)
        return _nested(ordered, found.paths, found.numbers or {})

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

    def _tensor(self, key: str, stored: Stored, items: list[Item]) -> torch.Tensor:
        dtype = getattr(torch, stored.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ConvertError(f"entry {key!r}: this torch has no dtype {stored.dtype}")
        nbytes = _nbytes(stored)
        filed = [self._filed(item, dtype) for item in items if item.nbytes]
        if sum(part.box.numel for part in filed) != nbytes:
            raise self._damaged(key, "its parts do not make it up")
        rows = ChunkedMemory((*stored.shape, dtype.itemsize), filed)
        if len(filed) == 1 and filed[0].strides is not None:  # as it was saved
            return self._made.tensor(stored.shape, dtype, rows, filed[0].strides, filed[0].memory)
        return self._made.tensor(stored.shape, dtype, rows)

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
            found = self._parser.tensor_in(peek, item.length, dtype, shape, item.known)
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


def _nbytes(stored: Stored) -> int:
    dtype = getattr(torch, stored.dtype, None)
    itemsize = dtype.itemsize if isinstance(dtype, torch.dtype) else 0
    return int(torch.Size(stored.shape).numel()) * itemsize


class _Number(int):
    """A key of a dictionary, and no place in a list."""


def _nested(
    flat: dict[str, Any],
    paths: dict[str, tuple[str | int, ...]],
    numbers: dict[str, tuple[int, ...]],
) -> Any:
    """Return the nest of dictionaries and lists in which values were before they were flattened.

    Raises:
        ConvertError: two of them are at one place.
    """
    root: dict[Any, Any] = {}
    for key, value in flat.items():
        path = paths.get(key, (key,))
        where = numbers.get(key, ())
        if where:
            path = tuple(_number(part) if at in where else part for at, part in enumerate(path))
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
    inside[int(part) if type(part) is _Number else part] = new
    return new


def _number(part: str | int) -> str | int:
    try:
        return _Number(part)
    except ValueError:
        return part
