"""What a checkpoint holds, as `inspect` tells it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from fastserial.formats.tensors import TensorEntry
from fastserial.printable import BoundedRepr

__all__ = ["Inspection", "StorageUse"]


@dataclass(frozen=True, slots=True, repr=False)
class StorageUse(BoundedRepr):
    """A storage and who is in it.

    Attributes:
        key: its name (`data/<key>` in a zip).
        dtype: type of its elements; `uint8` where torch keeps bytes only.
        nbytes: its size (bytes).
        offset: its first byte in the file, None if it is not there.
        location: the device it came from.
        tensors: keys of the tensors in it.
        needed_bytes: what would do if each of its tensors were saved alone, once.
    """

    key: str
    dtype: str
    nbytes: int
    offset: int | None
    location: str
    tensors: tuple[str, ...]
    needed_bytes: int

    @property
    def wasted_bytes(self) -> int:
        """Bytes that are saved only because a view drags its whole storage along."""
        return max(0, self.nbytes - self.needed_bytes)

    @property
    def is_shared(self) -> bool:
        """Whether several tensors are in it."""
        return len(self.tensors) > 1


@dataclass(frozen=True, slots=True, repr=False)
class Inspection(BoundedRepr):
    """What a checkpoint holds.

    Attributes:
        path: the file or folder.
        format: `zip`, `legacy`, `safetensors`, `dcp` or `torch_checkpointing`.
        bytes: size of the file, or of the folder's files.
        hints: what the file says about the torch that wrote it.
        archive_name: the folder in the names of the records (zip).
        records: (name, offset of the data, bytes) of each record (zip); of each item, with its
            file (DCP). In a folder of torch_checkpointing the names of records and storages begin
            with the file.
        tensors: in the order of the pickle.
        storages: in the order of the file; none of a DCP folder, which keeps parts of tensors.
        imports: the names that unpickling would import.
        values: how many other values (numbers, strings, ...) there are.
        notes: what is odd, and what could not be found out.
    """

    path: str
    format: str
    bytes: int
    hints: tuple[str, ...]
    archive_name: str | None
    records: tuple[tuple[str, int, int], ...]
    tensors: tuple[TensorEntry, ...]
    storages: tuple[StorageUse, ...]
    imports: tuple[str, ...]
    values: int
    notes: tuple[str, ...]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, shared ones counted each time."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def wasted_bytes(self) -> int:
        """Bytes that could be saved by cloning views before saving them."""
        return sum(storage.wasted_bytes for storage in self.storages)

    def offset_of(self, tensor: TensorEntry) -> int | None:
        """Return where the tensor's first element lies in the file (bytes), None if nowhere."""
        for storage in self.storages:
            if storage.key == tensor.storage and storage.offset is not None:
                return storage.offset + tensor.span[0]
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the inspection as plain JSON values."""
        places = {storage.key: storage.offset for storage in self.storages}
        tensors, storages = list(map(_values, self.tensors)), list(map(_values, self.storages))
        for row, tensor in zip(tensors, self.tensors, strict=True):
            start = places.get(tensor.storage or "")
            row["offset"] = None if start is None else start + tensor.span[0]
            row["contiguous"] = tensor.is_contiguous
        for row, storage in zip(storages, self.storages, strict=True):
            row["wasted_bytes"] = storage.wasted_bytes
        return {
            **_values(self),
            "tensors": tensors,
            "storages": storages,
            "tensor_bytes": self.tensor_bytes,
            "wasted_bytes": self.wasted_bytes,
        }


def _values(one: Inspection | StorageUse | TensorEntry) -> dict[str, Any]:
    """Return the attributes of one object. (`asdict` copies them: three times as long.)"""
    return {field.name: getattr(one, field.name) for field in fields(one)}
