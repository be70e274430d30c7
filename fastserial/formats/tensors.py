"""What a checkpoint holds, read from its pickle without executing it: storages and tensors.

Persistent ids describe the storages. `outline` walks the symbols of a pickle and finds every
tensor: its key in the state dict, dtype, shape, strides and range in a storage. Nested
dictionaries, lists, objects and modules contribute their keys, joined by dots:
`model.layers.0.weight`, `optimizer.state.3.exp_avg`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, NamedTuple

from fastserial.errors import CheckpointFileError, CorruptCheckpointError
from fastserial.formats.pickles import (
    Call,
    Decoded,
    Elided,
    Global,
    Limits,
    Mapping,
    Persistent,
    decode,
)
from fastserial.formats.source import Source
from fastserial.formats.zip_format import PICKLE, Directory, record_stream

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
_LARGEST = 2**63


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
    if type(numel) is not int or not 0 <= numel < _LARGEST:
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
    return first if type(first) is int and 0 <= first < _LARGEST else 0


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
    """Return the strides of a contiguous tensor (elements)."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def reach(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the elements of memory from a tensor's first one to the end of its last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


# -- tensors -------------------------------------------------------------------------------------

_CONTAINERS = (Call, Mapping, list, tuple)
_LONGEST_KEY = 4096
_MOST_DIMENSIONS = 1024
_MOST_NOTES = 100
_MOST_METADATA = 64  # torch writes two
_SHOWN_PARTS = 16  # of a key that is a tuple
_STRIDED = {
    "torch._utils._rebuild_tensor": None,
    "torch._utils._rebuild_tensor_v2": None,
    "torch._utils._rebuild_tensor_v3": 6,  # which argument is the dtype
    "torch._utils._rebuild_qtensor": None,
}
_METADATA = {"torch._utils._rebuild_tensor_v2": 6, "torch._utils._rebuild_tensor_v3": 7}
_PARAMETERS = (
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor",
)
_FROM_TYPE = ("torch._tensor._rebuild_from_type_v2", "torch._tensor._rebuild_from_type")
_NO_STORAGE = {
    "torch._utils._rebuild_meta_tensor_no_storage": 0,  # which argument is the dtype
    "torch._utils._rebuild_wrapper_subclass": 1,
}


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


@dataclass(slots=True)
class Outline:
    """What a checkpoint's pickle says.

    Attributes:
        tensors: in the order of the pickle.
        storages: by key.
        users: for each storage, the keys of the tensors (or bare storages) in it.
        globals: the names that unpickling would import.
        values: how many other values there are (numbers, strings, ...).
        problems: what is wrong with single tensors, by key.
        unread: why only `torch.load` can load a tensor (conjugated, a dtype of a later torch), by
            key.
        complete: False if the limits ended the search.
    """

    tensors: list[TensorEntry] = field(default_factory=list)
    storages: dict[str, StorageEntry] = field(default_factory=dict)
    users: dict[str, list[str]] = field(default_factory=dict)
    globals: frozenset[Global] = frozenset()
    values: int = 0
    problems: dict[str, str] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    complete: bool = True

    @property
    def notes(self) -> list[str]:
        """Why tensors are not in `tensors`, a sentence for each of the first."""
        found = self.problems | self.unread
        notes = [
            f"tensor {key or '(root)'}: {why}" for key, why in islice(found.items(), _MOST_NOTES)
        ]
        if len(found) > _MOST_NOTES:
            notes.append(f"and {len(found) - _MOST_NOTES} more tensors that are not listed")
        return notes


class _Visit(NamedTuple):
    """A value to visit, or (`leaving`) a container whose values have all been visited."""

    key: str
    value: Any
    kind: str
    depth: int
    leaving: bool


def outline(decoded: Decoded, limits: Limits | None = None) -> Outline:
    """Find the tensors in a pickle that was read.

    Raises:
        CorruptCheckpointError: its persistent ids make no sense.
    """
    found = Outline(storages=storage_table(decoded.persistents), globals=decoded.globals)
    _walk(decoded.value, found, limits or Limits())
    return found


def _walk(root: Any, found: Outline, limits: Limits) -> None:
    inside: set[int] = set()  # the containers around the value, which may hold themselves
    rest = [_Visit("", root, "tensor", 0, False)]
    budget = limits.visits
    while rest and budget > 0:
        visit = rest.pop()
        value = visit.value
        if visit.leaving:
            inside.discard(id(value))
        elif type(value) is Persistent:
            _bare_storage(visit.key, value, found)
        elif type(value) not in _CONTAINERS:
            found.values += 1
        elif visit.depth >= limits.depth:
            found.complete = False
        elif id(value) not in inside:
            inside.add(id(value))
            rest.append(visit._replace(leaving=True))
            known = len(found.tensors)
            try:
                children = list(_children(visit, found))
            except CorruptCheckpointError as error:
                found.problems[visit.key] = error.message
                continue
            except _OnlyForTorchError as error:
                found.unread[visit.key] = str(error)
                continue
            budget -= len(children) + len(visit.key) // 8 + 1
            budget -= sum(len(tensor.shape) for tensor in found.tensors[known:])
            rest.extend(
                _Visit(key, child, kind, visit.depth + 1, False)
                for key, child, kind in reversed(children)
            )
    found.complete = found.complete and not rest


class _OnlyForTorchError(Exception):
    """Only `torch.load` can load a tensor; the text says why."""


_Child = tuple[str, Any, str]


def _join(key: str, name: Any) -> str:
    if type(name) is bytes:
        text = name.decode("utf-8", "backslashreplace")
    elif type(name) is tuple:
        text = "(" + ", ".join(map(_text, name[:_SHOWN_PARTS])) + ")"
    else:
        text = _text(name)
    return (f"{key}.{text}" if key else text)[:_LONGEST_KEY]


def _text(name: Any) -> str:
    """Return a simple value as text; others may take forever to write out."""
    simple = type(name) in (str, float, bool, Global, Elided) or name is None
    return str(name) if simple or (type(name) is int and abs(name) < _LARGEST) else "?"


def _children(visit: _Visit, found: Outline) -> Iterator[_Child]:
    key, value = visit.key, visit.value
    if type(value) is Call:
        yield from _of_call(visit, value, found)
    elif type(value) is Mapping:
        yield from ((_join(key, name), item, "tensor") for name, item in value.items)
    else:
        yield from ((_join(key, index), item, "tensor") for index, item in enumerate(value))


def _of_call(visit: _Visit, call: Call, found: Outline) -> Iterator[_Child]:
    key, arguments = visit.key, call.arguments
    name = str(call.function) if type(call.function) is Global else ""
    if name in _STRIDED:
        yield from _strided(visit, name, _tuple(arguments, 4), found)
    elif name in _PARAMETERS:
        yield key, _tuple(arguments, 1)[0], "parameter"
        yield from _of_state(key, arguments[3:4])
    elif name in _FROM_TYPE:
        function, kind, inner, state = _tuple(arguments, 4)[:4]
        yield key, Call(function, inner), kind.name if type(kind) is Global else "tensor"
        yield from _of_state(key, (state,))
    elif name in _NO_STORAGE:
        _without_storage(visit, _tuple(arguments, 3), _NO_STORAGE[name], found)
    elif type(arguments) is tuple:
        yield from ((_join(key, index), item, "tensor") for index, item in enumerate(arguments))
    yield from _of_state(key, call.state)
    yield from ((_join(key, index), item, "tensor") for index, item in enumerate(call.appended))
    yield from ((_join(key, name), item, "tensor") for name, item in call.items)


def _of_state(key: str, states: Any) -> Iterator[_Child]:
    for state in states:
        # `__slots__` make it a pair of dictionaries.
        parts = state if type(state) is tuple and len(state) == 2 else (state,)
        for part in parts:
            if type(part) is Mapping:
                yield from ((_join(key, name), item, "tensor") for name, item in part.items)
            elif part is not None:
                yield key, part, "tensor"


def _bare_storage(key: str, symbol: Persistent, found: Outline) -> None:
    entry = storage_entry(symbol)
    if entry is not None:
        found.users.setdefault(entry.key, []).append(key)


def _strided(
    visit: _Visit, name: str, arguments: tuple[Any, ...], found: Outline
) -> Iterator[_Child]:
    symbol, offset, shape, stride = arguments[:4]
    if type(symbol) is not Persistent or not _is_count(offset):
        raise CorruptCheckpointError("it has no storage, or no offset in it")
    storage = storage_entry(symbol)
    if storage is None:
        raise CorruptCheckpointError("it has no storage")
    at = _STRIDED[name]
    dtype: str | None = storage.dtype
    if at is not None:
        dtype = _dtype(arguments[at]) if at < len(arguments) else None
    kind = visit.kind
    if name == "torch._utils._rebuild_qtensor":
        kind = "quantized"
        yield from (
            (_join(visit.key, index), item, "tensor") for index, item in enumerate(arguments[4:], 4)
        )
    offset += storage_view(symbol)
    entry = _entry(visit.key, dtype, shape, stride, storage.key, offset, kind)
    start, stop = entry.span
    if stop > found.storages[storage.key].nbytes:
        raise CorruptCheckpointError(
            f"its bytes {start} to {stop} go past the end of storage "
            f"{storage.key}, which has {storage.nbytes}"
        )
    found.users.setdefault(storage.key, []).append(visit.key)
    if _is_conjugated_or_negated(arguments, _METADATA.get(name, len(arguments))):
        raise _OnlyForTorchError("it is conjugated or negated: use torch.load")
    found.tensors.append(entry)


def _dtype(symbol: Any) -> str | None:
    if type(symbol) is Global and symbol.module == "torch" and dtype_name(symbol) is None:
        raise _OnlyForTorchError(
            f"fastserial does not know its dtype, {symbol.name}: use torch.load"
        )
    return dtype_name(symbol)


def _is_conjugated_or_negated(arguments: tuple[Any, ...], at: int) -> bool:
    """Return whether torch applies an operation to the elements when they are used."""
    metadata = arguments[at] if at < len(arguments) else None
    items = metadata.items if type(metadata) is Mapping else []
    return len(items) > _MOST_METADATA or any(
        type(name) is str and name in ("conj", "neg") and flag for name, flag in items
    )


def _without_storage(visit: _Visit, arguments: tuple[Any, ...], at: int, found: Outline) -> None:
    dtype, shape, stride = (*arguments, None)[at : at + 3]
    kind = visit.kind
    if at:
        kind = arguments[0].name if type(arguments[0]) is Global else kind
    found.tensors.append(_entry(visit.key, _dtype(dtype), shape, stride, None, 0, kind))


def _entry(
    key: str,
    dtype: str | None,
    shape: Any,
    stride: Any,
    storage: str | None,
    offset: int,
    kind: str,
) -> TensorEntry:
    sizes, steps = _integers(shape), _integers(stride)
    if dtype is None or len(sizes) != len(steps):
        raise CorruptCheckpointError("its dtype, shape and strides make no sense")
    nbytes = -(-math.prod(sizes) // PACKED.get(dtype, 1)) * ITEM_BYTES[dtype]
    return TensorEntry(key, dtype, sizes, steps, storage, offset, nbytes, kind)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _tuple(value: Any, length: int) -> tuple[Any, ...]:
    if type(value) is not tuple or len(value) < length:
        raise CorruptCheckpointError("it is not built as torch builds tensors")
    return value


def _integers(value: Any) -> tuple[int, ...]:
    if type(value) is Call and _text(value.function) == "torch.Size":
        value = _tuple(value.arguments, 1)[0]
    if type(value) in (tuple, list) and len(value) <= _MOST_DIMENSIONS:
        sizes = tuple(value)
        if all(_is_count(n) for n in sizes):
            return sizes
    raise CorruptCheckpointError("its shape or strides are not whole numbers")


def zip_outline(
    source: Source, directory: Directory, limits: Limits | None = None
) -> Outline | None:
    """Return what a zip checkpoint's pickle says of its tensors, None if it has no pickle.

    Raises:
        CorruptCheckpointError: the pickle is damaged, or none that torch writes.
        PickleLimitError: it is larger than the limits.
        OSError: the file cannot be read.
    """
    records = [record for record in directory.records if record.name == PICKLE]
    if not records:
        return None
    record = records[0]
    if len({(one.size, one.crc) for one in records}) > 1:
        raise CorruptCheckpointError("several records have this name, and differ", record=PICKLE)
    try:
        found = outline(decode(record_stream(source, record), limits), limits)
    except CheckpointFileError as error:
        if error.record is None:
            error.record = PICKLE
        raise
    by_name = {one.name: one for one in directory.records}
    for key, storage in found.storages.items():
        held = by_name.get(f"data/{key}")
        if held is not None:
            found.storages[key] = replace(
                storage,
                record=held.name,
                offset=held.data_offset if held.is_stored else None,
                held=held.size,
                crc=held.crc or None,
            )
    return found
