"""`fastserial.inspect`: the contents of a checkpoint, without loading it, and without torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from fastserial.files.remote import RemoteSource, is_url
from fastserial.formats.container import open_container
from fastserial.formats.outline import Outline
from fastserial.formats.pickles import Limits
from fastserial.formats.source import DescriptorSource, Source, naming
from fastserial.formats.tensors import TensorEntry
from fastserial.interrupts import Descriptors
from fastserial.memory.held_settings import paused_collection
from fastserial.printable import BoundedRepr


@dataclass(frozen=True, slots=True, repr=False)
class StorageUse(BoundedRepr):
    """A storage and the tensors in it.

    Attributes:
        key: its name (`data/<key>` in a zip).
        dtype: type of its elements; `uint8` where torch keeps bytes only.
        nbytes: its size (bytes).
        offset: its first byte in the file, None if it is missing.
        location: the device it came from.
        tensors: keys of the tensors in it.
    """

    key: str
    dtype: str
    nbytes: int
    offset: int | None
    location: str
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Inspection(BoundedRepr):
    """The contents of a checkpoint.

    Attributes:
        path: the file or folder.
        format: `zip`, `legacy`, `safetensors` or `dcp`.
        bytes: size of the file, or of the folder's files.
        archive_name: the folder in the names of the records (zip).
        records: (name, offset of the data, bytes) of each record (zip), or item with its file
            (DCP).
        tensors: in the order of the pickle.
        storages: in the order of the file; none in a DCP folder, which holds chunks of tensors.
        imports: the names that unpickling would import.
        values: the number of other values (numbers, strings, ...).
        notes: what is unusual, and what could not be found out.
    """

    path: str
    format: str
    bytes: int
    archive_name: str | None
    records: tuple[tuple[str, int, int], ...]
    tensors: tuple[TensorEntry, ...]
    storages: tuple[StorageUse, ...]
    imports: tuple[str, ...]
    values: int
    notes: tuple[str, ...]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors; shared bytes are counted for each."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def offset_of(self, tensor: TensorEntry) -> int | None:
        """Return the offset of the tensor's first element (bytes), None if it is missing."""
        return self.offsets([tensor])[0]

    def offsets(self, tensors: Sequence[TensorEntry]) -> list[int | None]:
        """Return `offset_of` each of some tensors."""
        found = {storage.key: storage.offset for storage in self.storages}
        starts = [found.get(tensor.storage or "") for tensor in tensors]
        return [
            None if start is None else start + tensor.span[0]
            for start, tensor in zip(starts, tensors, strict=True)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the inspection as plain JSON values."""
        tensors = zip(self.tensors, self.offsets(self.tensors), strict=True)
        return {
            **_values(self),
            "tensors": [
                _values(tensor) | {"offset": offset, "contiguous": tensor.is_contiguous}
                for tensor, offset in tensors
            ],
            "storages": [_values(storage) for storage in self.storages],
            "tensor_bytes": self.tensor_bytes,
        }


def _values(one: Inspection | StorageUse | TensorEntry) -> dict[str, Any]:
    """Return the attributes of an object; `asdict` copies them, in three times the time."""
    return {field.name: getattr(one, field.name) for field in fields(one)}


def inspect(path: str | os.PathLike[str], limits: Limits | None = None) -> Inspection:
    """Read a checkpoint's structure and pickle; the bytes of its tensors are not read.

        for tensor in fastserial.inspect("ckpt.pt").tensors:
            print(tensor.key, tensor.dtype, tensor.shape, tensor.nbytes)

    Args:
        path: the file, its URL, or a folder of torch.distributed.checkpoint.
        limits: what reading the pickle may take (bytes, seconds); by default what its size allows.

    Raises:
        CorruptCheckpointError: it is damaged.
        UnreadableCheckpointError: it is no checkpoint, or none that can be inspected.
        PickleLimitError: its pickle is larger than the limits.
        OSError: it cannot be read.
    """
    name = os.fspath(path)
    with naming(name), Descriptors() as files, paused_collection():
        if is_url(name):
            source = RemoteSource(name)
            found = _inspect(name, source, limits)
            source.check_unchanged()
            return found
        fd = files.open(name, os.O_RDONLY | os.O_NONBLOCK)
        return _inspect(name, DescriptorSource(fd), limits)


def _inspect(name: str, source: Source, limits: Limits | None) -> Inspection:
    container = open_container(source, name, limits, unique=False)
    found = container.outline
    return Inspection(
        path=name,
        format=container.format,
        bytes=container.nbytes,
        archive_name=container.archive_name,
        records=tuple(container.listing()),
        tensors=tuple(found.tensors),
        storages=_storages(found),
        imports=tuple(sorted(map(str, found.globals))),
        values=found.values,
        notes=tuple(container.notes()),
    )


def _storages(found: Outline) -> tuple[StorageUse, ...]:
    uses = [
        StorageUse(
            key=key,
            dtype=entry.dtype,
            nbytes=entry.nbytes,
            offset=entry.offset,
            location=entry.location,
            tensors=tuple(found.users.get(key, ())),
        )
        for key, entry in found.storages.items()
    ]
    return tuple(sorted(uses, key=lambda use: (use.offset is None, use.offset or 0)))
