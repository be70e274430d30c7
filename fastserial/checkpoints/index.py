"""Which tensors a checkpoint holds, and where in the file their bytes lie.

For zip and legacy checkpoints of torch and for safetensors files. No pickle is executed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.serialization import LoadEndianness, get_default_load_endianness

from fastserial.errors import (
    CheckpointFileError,
    CheckpointKeyError,
    UnreadableCheckpointError,
    UnreadableTensorError,
)
from fastserial.formats.detect import Format, checkpoint_format
from fastserial.formats.legacy.structure import read_legacy
from fastserial.formats.safetensors import read_header
from fastserial.formats.source import DescriptorSource, Source
from fastserial.formats.storages import ITEM_BYTES, PACKED, contiguous_stride
from fastserial.formats.tensors import Outline, TensorEntry, outline, zip_outline
from fastserial.formats.zip.directory import Directory
from fastserial.formats.zip.records import read_places, read_record

__all__ = ["StoragePlace", "TensorIndex", "TensorPlace", "is_little_endian", "read_index"]

_SMALL_RECORD = 64


@dataclass(frozen=True, slots=True)
class StoragePlace:
    """A storage's bytes: `nbytes` at `offset` of the file; `crc` None if the file has none."""

    name: str
    offset: int
    nbytes: int
    crc: int | None


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """A tensor's place.

    Attributes:
        key: its place in what was saved, such as `model.weight`.
        dtype: name of its dtype, such as `float32`.
        shape, stride: in elements.
        first: its first element's byte in the storage.
        storage: where the storage lies.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    storage: StoragePlace

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES[self.dtype]


class TensorIndex:
    """The tensors of a checkpoint by key, in the order in which they were saved."""

    def __init__(self, container: str, entries: dict[str, TensorPlace | str]) -> None:
        """Keep what was found; a text instead of a place says why a tensor has none."""
        self.container = container
        self._entries = entries

    def keys(self) -> list[str]:
        """Return the keys of all tensors, those that cannot be read by themselves included.

        Those of which the pickle does not say enough come first.
        """
        return list(self._entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def place(self, key: str) -> TensorPlace:
        """Return a tensor's place.

        Raises:
            CheckpointKeyError: there is no such tensor.
            UnreadableTensorError: it is there, but cannot be read by itself; says why.
        """
        found = self._entries.get(key)
        if found is None:
            raise CheckpointKeyError(f"there is no tensor {key!r}")
        if isinstance(found, str):
            raise UnreadableTensorError(f"tensor {key!r} cannot be read by itself: {found}")
        return found


def read_index(fd: int, path: str) -> TensorIndex:
    """Read the index of an open checkpoint.

    Args:
        fd: its descriptor; positions are not used.
        path: its name, for errors.

    Raises:
        CorruptCheckpointError: the file is damaged.
        UnreadableCheckpointError: the file is no checkpoint.
        PickleLimitError: its pickle is larger than the limits.
        OSError: it cannot be read.
    """
    try:
        found = checkpoint_format(fd, path)
        source = DescriptorSource(fd)
        if found is Format.ZIP:
            return _of_zip(source)
        return _of_legacy(source) if found is Format.LEGACY else _of_safetensors(source)
    except CheckpointFileError as error:
        error.path = error.path or path
        raise


def _of_zip(source: Source) -> TensorIndex:
    directory = read_places(source)
    found = zip_outline(source, directory)
    if found is None:
        raise UnreadableCheckpointError(
            "the archive holds no data.pkl: not a checkpoint of torch.save"
        )
    if not is_little_endian(source, directory):
        raise UnreadableTensorError("the file was written on a big-endian machine: use torch.load")
    storages = {
        record.name.removeprefix("data/"): StoragePlace(
            record.name, record.data_offset, record.size, record.crc or None
        )
        for record in directory.records
        if record.is_stored and record.name.startswith("data/")
    }
    return TensorIndex("zip", _entries(found, storages))


def is_little_endian(source: Source, directory: Directory) -> bool:
    """Return whether `torch.load` takes the storages of a zip for little-endian.

    Raises:
        CorruptCheckpointError: the record that says so is damaged.
        OSError: it cannot be read.
    """
    record = directory.find("byteorder")
    if record is not None:
        return read_record(source, record, _SMALL_RECORD) == b"little"
    return get_default_load_endianness() is not LoadEndianness.BIG  # torch before 2.1 wrote none


def _of_legacy(source: Source) -> TensorIndex:
    file = read_legacy(source)
    if not file.little_endian:
        raise UnreadableTensorError("the file was written on a big-endian machine: use torch.load")
    storages = {
        storage.key: StoragePlace(storage.key, storage.data_offset, storage.nbytes, None)
        for storage in file.storages
    }
    return TensorIndex("legacy", _entries(outline(file.decoded), storages))


def _of_safetensors(source: Source) -> TensorIndex:
    entries: dict[str, TensorPlace | str] = {}
    for entry in read_header(source):
        storage = StoragePlace(entry.key, entry.offset, entry.nbytes, None)
        if entry.dtype is None:
            entries[entry.key] = f"torch has no dtype {entry.type_name}"
            continue
        stride = contiguous_stride(entry.shape)
        entries[entry.key] = TensorPlace(entry.key, entry.dtype, entry.shape, stride, 0, storage)
    return TensorIndex("safetensors", entries)


def _entries(found: Outline, storages: dict[str, StoragePlace]) -> dict[str, TensorPlace | str]:
    entries: dict[str, TensorPlace | str] = {}
    for tensor in found.tensors:
        if tensor.key in entries:
            entries[tensor.key] = "two tensors have this key"
        else:
            entries[tensor.key] = _place(tensor, storages)
    return found.problems | found.unread | entries


def _place(tensor: TensorEntry, storages: dict[str, StoragePlace]) -> TensorPlace | str:
    if tensor.storage is None:
        return "the file holds no bytes of it (a meta tensor)"
    if tensor.kind == "quantized" or tensor.dtype in PACKED:
        return "it is quantized"
    storage = storages.get(tensor.storage)
    start, stop = tensor.span
    if storage is None and start != stop:
        return "its storage is compressed, or not in the file"
    if storage is None:
        storage = StoragePlace(tensor.storage, 0, 0, None)
    elif stop > storage.nbytes and start != stop:
        return f"its bytes go past the {storage.nbytes} of its storage"
    return TensorPlace(tensor.key, tensor.dtype, tensor.shape, tensor.stride, start, storage)
