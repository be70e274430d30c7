"""What a checkpoint holds, as a value that can be sent: its containers, and where each tensor is.

One rank unpickles the file by torch's `weights_only` rules, over a mapping that is never touched;
in what it sends, a `FileTensor` stands for each tensor.
"""

from __future__ import annotations

import copy
import os
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fastserial.checkpoints.convert import type_name
from fastserial.checkpoints.mapped_source import map_checkpoint
from fastserial.checksums import crc32
from fastserial.errors import CorruptCheckpointError
from fastserial.formats.source import DescriptorSource
from fastserial.formats.stored import Chunk, whole_box
from fastserial.formats.tensors import reach
from fastserial.formats.zip_format import read_places
from fastserial.nests import is_container, leaf_types, sequence_like

_ENDS = 64 * 1024  # bytes: a zip's checksums stand near its end
_ELEMENT_WISE = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Record:
    """Bytes whose CRC-32 is stored: `nbytes` at `offset`, of a storage or of a chunk."""

    name: str
    offset: int
    nbytes: int
    crc: int


@dataclass(slots=True, eq=False)
class FileTensor:
    """A tensor in the file.

    Attributes:
        number: of this mention of it, in the order of the file.
        dtype: its dtype.
        shape: in elements.
        chunks: its elements: in a file one chunk, in a folder of torch.distributed.checkpoint some;
            none if there is a problem, or no element.
        pending: `conj`, `neg`: what torch applies to the elements when they are used.
        problem: why it cannot be read element by element, None if it can.
        same: number of the first mention of the same object; -1 where that is not known.
        held: the bytes of its elements in order, if it is in a value that was read.
    """

    number: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    pending: tuple[str, ...] = ()
    problem: str | None = None
    same: int = -1
    held: torch.Tensor | None = None

    @property
    def whole(self) -> torch.Tensor:
        """The tensor, if it is held."""
        held = torch.empty(0, dtype=torch.uint8) if self.held is None else self.held
        return held.view(self.dtype).view(self.shape)


leaf_types.add(FileTensor)


@dataclass(frozen=True, slots=True)
class FileIndex:
    """A checkpoint without its bytes.

    Attributes:
        container: `zip`, `legacy`, `safetensors` or `dcp`.
        size: bytes of the file; of a folder, of what completes it.
        fingerprint: see `fingerprint`.
        value: what was saved, with a `FileTensor` for each tensor.
        records: the storages that have a checksum, by offset.
        files: names of a folder's files with chunks.
        damage: of values, which were read already; then there is nothing else.
        is_verified: all of these were compared with checksums.
    """

    container: str
    size: int
    fingerprint: int
    value: Any
    records: tuple[Record, ...] = ()
    files: tuple[str, ...] = ()
    damage: str = ""
    is_verified: bool = True

    def is_of(self, fd: int) -> bool:
        """Return whether an open file of this size is the one, as far as is known."""
        return (
            fingerprint(fd, self.size, self.size if self.container == "dcp" else _ENDS)
            == self.fingerprint
        )


def is_plain_tuple(value: object) -> bool:
    """Return whether a value is a tuple, with names or without, and no class of another purpose."""
    return type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields"))


def fingerprint(fd: int, size: int, most: int = _ENDS) -> int:
    """Return a checksum of both ends of a file, by which copies on several nodes are compared.

    Args:
        most: how long these are (bytes).
    """
    first = os.pread(fd, min(size, most), 0)
    last = os.pread(fd, min(size, most), max(0, size - most))
    return crc32(last, crc32(first))


def index_of_file(fd: int, path: str, name: str = "") -> FileIndex:
    """Read the index of an open checkpoint.

    Args:
        fd: its descriptor.
        path: its path, for errors.
        name: of the file in its folder, if it is one of several.

    Raises:
        CorruptCheckpointError: it is damaged.
        UnreadableCheckpointError: it is no checkpoint.
        ConvertError: its pickle needs more than `weights_only` allows.
        OSError: it cannot be read.
    """
    size = os.fstat(fd).st_size
    mapped = map_checkpoint(fd, path)
    records: tuple[Record, ...] = ()
    if mapped.container == "zip":
        directory = read_places(DescriptorSource(fd))
        records = tuple(
            Record(record.name, record.data_offset, record.size, record.crc)
            for record in sorted(directory.records, key=lambda one: one.data_offset)
            if record.size and record.crc and record.is_stored and record.name.startswith("data/")
        )
    value = without_bytes(mapped.value, mapped, name)
    return FileIndex(mapped.container, size, fingerprint(fd, size), value, records)


class StorageOffsets(Protocol):
    """Says where storages are, whose bytes are in files."""

    def offset_of(self, storage: torch.UntypedStorage) -> int | None:
        """Return where a storage's bytes begin, None if they are not there."""


def without_bytes(value: Any, offsets: StorageOffsets | None, name: str = "") -> Any:
    """Return a nest with `FileTensor`s for its tensors; containers are new ones of their types.

    Args:
        offsets: of the storages in the file; None: they have their bytes themselves.
        name: of the file.
    """
    return _IndexBuilder(offsets, name).without_bytes(value)


class _IndexBuilder:
    def __init__(self, offsets: StorageOffsets | None, name: str) -> None:
        self._offsets = offsets
        self._name = name
        self._made: dict[int, Any] = {}
        self._first: dict[int, int] = {}  # number of the first mention, by the tensor's `id`
        self._count = 0

    def without_bytes(self, value: Any) -> Any:
        new: Any
        if isinstance(value, torch.Tensor):
            self._count += 1
            return self._place_of(value)
        if is_plain_tuple(value):
            return sequence_like(value, list(map(self.without_bytes, value)))
        if not (isinstance(value, MutableMapping | list) and is_container(value)):
            return value
        if id(value) in self._made:  # it may hold itself
            return self._made[id(value)]
        new = self._made[id(value)] = copy.copy(value)
        new.clear()
        if isinstance(value, MutableMapping):
            for key, item in value.items():  # a Counter's `update` would count
                new[key] = self.without_bytes(item)
        else:
            new.extend(map(self.without_bytes, value))
        return new

    def _place_of(self, tensor: torch.Tensor) -> FileTensor:
        shape: tuple[int, ...] = tuple(tensor.shape)
        problem = _problem(tensor)
        chunks: tuple[Chunk, ...] = ()
        held = _elements_of(tensor) if problem is None and self._offsets is None else None
        if problem is None and self._offsets is not None and tensor.numel():
            start = _start_of(tensor, self._offsets)
            dtype, strides = type_name(tensor), tuple(tensor.stride())
            length = reach(shape, strides) * tensor.itemsize
            chunks = (Chunk(whole_box(shape), dtype, self._name, start, length, 0, strides),)
        pending = tuple(
            name for name, has in (("conj", tensor.is_conj()), ("neg", tensor.is_neg())) if has
        )
        number = self._count - 1
        same = self._first.setdefault(id(tensor), number)
        return FileTensor(number, tensor.dtype, shape, chunks, pending, problem, same, held)


def _elements_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements as bytes, which can be pickled whatever its dtype is."""
    found = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return found.flatten().view(torch.uint8).clone()


def _start_of(tensor: torch.Tensor, offsets: StorageOffsets) -> int:
    """Return where a tensor's first element is in the file."""
    storage, first = tensor.untyped_storage(), int(tensor.storage_offset())
    start = offsets.offset_of(storage)
    if start is None:
        raise CorruptCheckpointError("a tensor's storage is not in the file")
    if (first + reach(tensor.shape, tensor.stride())) * tensor.itemsize > storage.nbytes():
        raise CorruptCheckpointError("a tensor ends past the end of its storage")
    return start + first * tensor.itemsize


def _problem(tensor: torch.Tensor) -> str | None:
    """Return why a tensor cannot be read element by element."""
    if type(tensor) not in _ELEMENT_WISE:
        return f"in the file it is a {type(tensor).__name__}"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"in the file its layout is {tensor.layout}"
    if tensor.is_quantized:
        return "in the file it is quantized"
    if tensor.device.type == "meta":
        return "the file holds no bytes of it (a meta tensor)"
    return None
