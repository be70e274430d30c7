"""The safetensors container: a length, a JSON header, and the tensors back to back.

Eight bytes (little-endian) hold the length of the header, which gives each tensor's type, shape and
range in the bytes after it. The header is padded with spaces so that these start at a multiple of
eight; larger elements come first, so that all are aligned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastserial.errors import CorruptCheckpointError
from fastserial.formats.bounded_json import parse_json
from fastserial.formats.outline import Outline
from fastserial.formats.source import Source
from fastserial.formats.tensors import (
    ITEM_BYTES,
    MOST_DIMENSIONS,
    StorageEntry,
    TensorEntry,
    contiguous_stride,
    element_count,
)
from fastserial.interrupts import ours

STEM = "model"
ONE_FILE = f"{STEM}.safetensors"
INDEX = f"{ONE_FILE}.index.json"
_LENGTH_BYTES = 8
_MOST_HEADER = 100_000_000  # as the reference implementation
METADATA = "__metadata__"

# Names of types in the header, by torch's names, in the order of the file (safetensors 0.8).
TYPE_NAMES = {
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "float4_e2m1fn_x2": "F4",
    "bool": "BOOL",
}
# Elements of the file in one of torch's: there, the last dimension has as many times its size.
_PACKED = {"float4_e2m1fn_x2": 2}
_RANKS = {name: rank for rank, name in enumerate(TYPE_NAMES)}
_DTYPES = {name: dtype for dtype, name in TYPE_NAMES.items()}


class Header(NamedTuple):
    """What the header says: the tensors in the order of the file, and free text by name."""

    outline: Outline
    metadata: dict[str, str]


def read_header(source: Source) -> Header:
    """Read the header. Each tensor has a storage of its own.

    Raises:
        CorruptCheckpointError: it is damaged, or names bytes that are not in the file.
        UnreadableCheckpointError: it takes far more memory than a header of tensors.
        OSError: the file cannot be read.
    """
    header, at = _header(source)
    free = header.pop(METADATA, None)
    outline = Outline()
    storages = [_storage(key, value, at) for key, value in header.items()]
    for storage in sorted(storages, key=lambda one: one.offset or 0):
        key = storage.key
        if storage.offset != at:
            raise CorruptCheckpointError("its bytes overlap others, or leave a gap", record=key)
        at += storage.held
        outline.storages[key] = storage
        outline.users[key] = [key]
        if header[key]["dtype"] not in _DTYPES:
            outline.unread[key] = f"torch has no dtype {storage.dtype}"
            continue
        shape, packed = tuple(header[key]["shape"]), _PACKED.get(storage.dtype, 1)
        count = element_count(shape, storage.held * packed)
        if count is None or count * ITEM_BYTES[storage.dtype] != storage.held * packed:
            raise CorruptCheckpointError("its shape does not fit its bytes", record=key)
        held = torch_shape(storage.dtype, shape)
        if held is None:
            outline.unread[key] = (
                f"torch has no {storage.dtype} of this last dimension: {shape[-1]}"
            )
            continue
        if len(shape) > MOST_DIMENSIONS:
            outline.unread[key] = f"it has {len(shape)} dimensions"
            continue
        stride = contiguous_stride(held)
        outline.tensors.append(TensorEntry(key, storage.dtype, held, stride, key, 0, storage.held))
    if at != source.size:
        raise CorruptCheckpointError(f"the tensors end at byte {at}, the file at {source.size}")
    items = free.items() if isinstance(free, dict) else ()
    return Header(outline, {key: text for key, text in items if isinstance(text, str)})


def _header(source: Source) -> tuple[dict[str, Any], int]:
    """Return the header and where the tensors start (bytes)."""
    length = int.from_bytes(source.read_at(0, _LENGTH_BYTES), "little")
    if length > min(source.size - _LENGTH_BYTES, _MOST_HEADER):
        raise CorruptCheckpointError(f"a header of {length} bytes does not fit the file", offset=0)
    try:
        header = parse_json(source.read_at(_LENGTH_BYTES, length))
    except ours(ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CorruptCheckpointError("the header is no JSON object")
    return header, _LENGTH_BYTES + length


def _storage(key: str, value: Any, start: int) -> StorageEntry:
    """Return the range of a tensor; `dtype` is the header's name where torch has no such dtype."""
    try:
        name, shape, (first, last) = value["dtype"], value["shape"], value["data_offsets"]
        numbers = [*shape, first, last]
        sound = all(type(n) is int and 0 <= n < 2**63 for n in numbers) and type(name) is str
    except ours(KeyError, TypeError, ValueError):
        sound = False
    if not sound or last < first:
        raise CorruptCheckpointError("its entry in the header is damaged", record=key)
    nbytes = last - first
    dtype = _DTYPES.get(name, name)
    return StorageEntry(key, dtype, nbytes, "cpu", key, start + first, nbytes)


def torch_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape that torch gives a tensor of the file; None if it can give it none."""
    packed = _PACKED.get(dtype, 1)
    if packed == 1:
        return shape
    if not shape or shape[-1] % packed:
        return None
    return (*shape[:-1], shape[-1] // packed)


def is_writable(dtype: str, shape: Sequence[int]) -> bool:
    """Return whether a file can hold a tensor of torch's."""
    return dtype in TYPE_NAMES and (dtype not in _PACKED or len(shape) > 0)


def file_order(tensors: Mapping[str, str]) -> list[str]:
    """Return the keys of tensors in the order of their file.

    Args:
        tensors: torch's name of the dtype, by key.
    """
    return sorted(tensors, key=lambda key: (_RANKS[tensors[key]], key))


def split(sizes: Mapping[str, int], most: int) -> dict[str, list[str]]:
    """Return the keys of each file of a model, as huggingface_hub divides them.

    Tensors without bytes are in the file of the first of them.

    Args:
        sizes: bytes of each tensor.
        most: bytes of tensors in a file; a larger tensor has a file of its own.
    """
    parts: list[list[str]] = []
    current: list[str] = []
    empty: list[str] | None = None  # the file of the first tensor without bytes
    free = most
    for key, nbytes in sizes.items():
        if not nbytes and empty is not None:
            empty.append(key)
            continue
        if nbytes > most:
            parts.append([key])
            continue
        if nbytes > free:
            parts.append(current)
            current, free = [], most
        if not nbytes:
            empty = current
        current.append(key)
        free -= nbytes
    if current or not parts:
        parts.append(current)
    if len(parts) == 1:
        return {ONE_FILE: parts[0]}
    return {shard_name(number, len(parts)): keys for number, keys in enumerate(parts, 1)}


def shard_name(number: int, count: int) -> str:
    """Return the name of a file of a model of several files; the first is number 1."""
    return f"{STEM}-{number:05}-of-{count:05}.safetensors"


def index_bytes(files: Mapping[str, Sequence[str]], nbytes: int, parameters: int) -> bytes:
    """Return the index of a model of several files, as transformers writes it.

    Args:
        files: the keys of the tensors in each.
        nbytes: of all tensors.
        parameters: the number of elements of the model's parameters.
    """
    weights = {key: name for name, keys in files.items() for key in keys}
    totals = {"total_parameters": parameters, "total_size": nbytes}
    index = {"metadata": totals, "weight_map": weights}
    return json.dumps(index, indent=2, sort_keys=True).encode() + b"\n"


def header_bytes(
    tensors: Sequence[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    """Return length and header for tensors that follow it in this order.

    Args:
        tensors: key, torch's name of the dtype, shape and bytes of each.
        metadata: free text.

    Raises:
        UnicodeEncodeError: a key or a text has lone surrogates, which UTF-8 cannot encode.
    """
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for key, dtype, shape, nbytes in tensors:
        packed = _PACKED.get(dtype, 1)
        header[key] = {
            "dtype": TYPE_NAMES[dtype],
            "shape": [*shape[:-1], shape[-1] * packed] if shape else [],
            "data_offsets": [at, at + nbytes],
        }
        at += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text
