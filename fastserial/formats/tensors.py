"""Storages and tensors in a checkpoint: dtypes, shapes, and where their bytes are.

The persistent ids in a pickle describe the storages. Sizes may be anything that a hostile file
gives: products of them are bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fastserial.errors import CorruptCheckpointError
from fastserial.formats.pickles import Global, Persistent

_BY_SIZE = {
    1: (
        "bool uint8 int8 qint8 quint8 quint4x2 quint2x4 bits8 bits4x2 bits2x4 bits1x8 "
        "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
        "float4_e2m1fn_x2 int1 int2 int3 int4 int5 int6 int7 "
        "uint1 uint2 uint3 uint4 uint5 uint6 uint7"
    ),
    2: "float16 bfloat16 int16 uint16 bits16",
    4: "float32 int32 uint32 qint32 complex32 bcomplex32",
    8: "float64 int64 uint64 complex64",
    16: "complex128",
}
# Bytes of one element (of one byte's elements, for those in `PACKED`), by dtype name.
ITEM_BYTES = {name: size for size, names in _BY_SIZE.items() for name in names.split()}

# Types that keep several elements in a byte, and how many.
PACKED = {"quint4x2": 2, "quint2x4": 4}

_STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}
_PID_FIELDS = 5
LARGEST = 2**63 - 1  # the most elements, and the longest stride, that torch counts
MOST_DIMENSIONS = 1024


@dataclass(frozen=True, slots=True)
class StorageEntry:
    """A storage, as a persistent id describes it, and the location of its bytes.

    Attributes:
        key: its name in the file (`data/<key>` in a zip).
        dtype: type of its elements; `uint8` where torch keeps bytes only.
        nbytes: size (bytes).
        location: the device it came from, such as `cpu` or `cuda:0`.
        record: its name in errors.
        offset: its first byte in the file, None if it is missing or compressed.
        held: bytes of it that the file holds.
        crc: CRC-32 of these, None if the file has none.
    """

    key: str
    dtype: str
    nbytes: int
    location: str
    record: str = ""
    offset: int | None = None
    held: int = 0
    crc: int | None = None


def dtype_name(symbol: Any) -> str | None:
    """Return the name of the dtype that a symbol stands for, or None."""
    if type(symbol) is Global and symbol.module == "torch" and symbol.name in ITEM_BYTES:
        return symbol.name
    return None


def _ascii(value: Any) -> str | None:
    if type(value) is bytes:  # Python 2 wrote it
        return value.decode("ascii", "backslashreplace")
    return value if type(value) is str else None


def storage_entry(symbol: Persistent) -> StorageEntry | None:
    """Return the storage a persistent id asks for; None if it asks for something else.

    Raises:
        CorruptCheckpointError: it is no persistent id that torch writes.
    """
    pid = symbol.pid
    kind = _ascii(pid[0]) if type(pid) is tuple and pid else None
    if kind == "module":
        return None
    if kind != "storage" or len(pid) < _PID_FIELDS:
        raise CorruptCheckpointError("a persistent id that torch does not write")
    _, storage_type, key, location, numel = pid[:_PID_FIELDS]
    name, device = _ascii(key), _ascii(location)
    if type(storage_type) is not Global or name is None or device is None:
        raise CorruptCheckpointError("a persistent id that torch does not write")
    dtype = _STORAGE_DTYPES.get(storage_type.name)
    if dtype is None:
        raise CorruptCheckpointError(f"unknown storage type {storage_type}", record=name)
    if type(numel) is not int or not 0 <= numel <= LARGEST:
        raise CorruptCheckpointError("a storage without a size", record=name)
    return StorageEntry(name, dtype, numel * ITEM_BYTES[dtype], device)


def storage_view(symbol: Persistent) -> int:
    """Return the first element of the part of a storage that a persistent id asks for.

    Only legacy files have parts: storages of their own that share memory.
    """
    view = symbol.pid[_PID_FIELDS] if len(symbol.pid) > _PID_FIELDS else None
    if type(view) is not tuple or len(view) != 3:
        return 0
    first = view[1]
    return first if type(first) is int and 0 <= first <= LARGEST else 0


def storage_table(persistents: Iterable[Persistent]) -> dict[str, StorageEntry]:
    """Return the storages that persistent ids ask for, by key, in order of their first mention.

    Raises:
        CorruptCheckpointError: an id is none that torch writes, or two disagree about a storage.
    """
    table: dict[str, StorageEntry] = {}
    for symbol in persistents:
        entry = storage_entry(symbol)
        if entry is None:
            continue
        known = table.setdefault(entry.key, entry)
        if known.nbytes != entry.nbytes:
            raise CorruptCheckpointError(
                f"described with {known.nbytes} and with {entry.nbytes} bytes", record=entry.key
            )
    return table


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor (elements), which stop growing at `LARGEST`."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step = min(step * max(size, 1), LARGEST)
    return tuple(reversed(strides))


def element_count(shape: Sequence[int], most: int = LARGEST) -> int | None:
    """Return the number of elements of a shape, None if there are more than `most`.

    It multiplies no further: a file may give a million dimensions.
    """
    if 0 in shape:
        return 0
    count = 1
    for size in shape:
        count *= size
        if count > most:
            return None
    return count


def reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the elements of memory from a tensor's first one to the end of its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a checkpoint.

    Attributes:
        key: its path in what was saved, such as `model.weight`; empty if nothing else was saved.
        dtype: such as `float32`.
        shape, stride: in elements.
        storage: key of its storage, None if the file holds no bytes of it (meta tensors).
        storage_offset: first element in the storage.
        nbytes: bytes of its elements if they were contiguous.
        kind: `tensor`, `parameter`, `quantized`, or the name of the subclass.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage: str | None
    storage_offset: int
    nbytes: int
    kind: str = "tensor"

    @property
    def span(self) -> tuple[int, int]:
        """Its byte range in the storage: the first byte, and the one after the last."""
        size, packed = ITEM_BYTES[self.dtype], PACKED.get(self.dtype, 1)
        first = self.storage_offset // packed * size
        return first, first + -(-reach(self.shape, self.stride) // packed) * size

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements are contiguous in the storage."""
        expected = 1
        for n, step in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if n != 1 and step != expected:
                return 0 in self.shape
            expected *= n
        return True
