"""`.metadata` of torch.distributed.checkpoint, parsed without unpickling it.

It is a pickle of torch's classes. Our writer appends a checksum, which unpickling ignores, and adds
an attribute to each item (`Known`). Values may be mentioned any number of times, so chunks and
names are counted, and charged to the budget of the pickle, before they are made.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fastserial.checksums import check_crc, crc32
from fastserial.errors import CorruptCheckpointError
from fastserial.formats.pickles import Budget, Call, Decoded, Global, Limits, Mapping, decode
from fastserial.formats.source import BytesSource, ByteStream, is_path, naming
from fastserial.formats.stored import Box, Chunk, StoredTensor
from fastserial.formats.tensors import LARGEST, MOST_DIMENSIONS, element_count
from fastserial.interrupts import ours

METADATA = ".metadata"  # completes a folder
METADATA_NAME = re.compile(r"(?:__\d+)?\.metadata", re.ASCII)  # of all ranks, or of one
_MARK = b"fastserial"
_TRAILER = struct.Struct("<10sI")
# What is charged for, in bytes of memory.
_ITEM_COST = 1200  # with its lines in output
_ENTRY_COST = 800  # a chunk, a location
_FIELD_COST = 80
_DIMENSION_COST = 256
_CHARACTER_COST = 8
_CLASSES = "torch.distributed.checkpoint."


def framed(pickled: bytes) -> bytes:
    """Return the contents of the file for a pickle of the metadata."""
    return pickled + _TRAILER.pack(_MARK, crc32(pickled))


def is_framed(data: bytes, path: str) -> bool:
    """Return whether the contents of the file have a checksum.

    Raises:
        CorruptCheckpointError: it does not match the contents.
    """
    at = len(data) - _TRAILER.size
    mark, crc = _TRAILER.unpack_from(data, at) if at >= 0 else (b"", 0)
    if mark == _MARK:
        check_crc(crc32(data[:at]), crc, path)
    return bool(mark == _MARK)


class Known(NamedTuple):
    """What our writer knew of an item.

    Attributes:
        start: offset of its elements in the item; None: only `torch.load` can find it.
        crc: CRC-32 of the elements' bytes, of a value of all bytes; None: not taken.
        strides: of a tensor that is not contiguous.
    """

    start: int | None
    crc: int | None
    strides: tuple[int, ...] | None = None


@dataclass(slots=True)
class Metadata:
    """What `.metadata` says.

    Attributes:
        tensors: by key, in the order of the file.
        values: what is no tensor, by key.
        paths: the paths of keys in the nested state, as far as they are given.
        version: of the layout.
        framed: it has a checksum (which is right).
        globals: the names that unpickling it would import.
    """

    tensors: dict[str, StoredTensor]
    values: dict[str, Chunk]
    paths: dict[str, tuple[str | int, ...]]
    version: str | None
    framed: bool
    globals: frozenset[Global]

    def items(self) -> Iterator[Chunk]:
        """Yield all chunks and values that have a location."""
        return (chunk for chunk in self._chunks() if chunk.file)

    def missing(self) -> Iterator[str]:
        """Yield the names of chunks and values that have none."""
        return (chunk.name for chunk in self._chunks() if not chunk.file)

    def _chunks(self) -> Iterator[Chunk]:
        yield from (chunk for tensor in self.tensors.values() for chunk in tensor.chunks)
        yield from self.values.values()


def parse(pickled: bytes, path: str) -> Metadata:
    """Parse the contents of a `.metadata`. Nothing is imported or called.

    Raises:
        CorruptCheckpointError: it is damaged, or nothing of torch.distributed.checkpoint.
        UnreadableCheckpointError: it has opcodes that are not read.
        PickleLimitError: it takes more than its size allows.
    """
    framed = is_framed(pickled, path)
    limits = replace(Limits.of(len(pickled)), kept=len(pickled))  # keys may be of any length
    budget = Budget(limits)
    try:
        with naming(path):
            found = decode(ByteStream(BytesSource(pickled)), budget)
            budget.narrow(found.nbytes)
            return _metadata(found, framed, budget)
    except ours(AttributeError, LookupError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(
            "it is damaged, or no metadata of torch.distributed.checkpoint", path=path
        ) from error


_Place = tuple[str, tuple[int, ...] | None]  # a key; of a tensor, where a chunk begins


def _metadata(found: Decoded, framed: bool, budget: Budget) -> Metadata:
    whole = _attributes(found.value, "Metadata", budget)
    locations: dict[_Place, Chunk] = {}
    for index, location in _pairs(whole.get("storage_data") or Mapping()):
        named = _attributes(index, "MetadataIndex", budget)
        offset = named.get("offset")
        where = None if offset is None else _size(offset)
        budget.spend(_ENTRY_COST + _DIMENSION_COST * len(where or ()))
        locations[_key(named["fqn"]), where] = _location(location, budget)
    version, paths = whole.get("version"), _paths(whole.get("planner_data"), budget)
    version = version if type(version) is str else None
    made = Metadata({}, {}, paths, version, framed, found.globals)

    def item(key: str, box: Box | None, dtype: str | None) -> Chunk:
        known = locations.pop((key, box and box.offsets), _NOWHERE)
        budget.spend(_ITEM_COST + _CHARACTER_COST * (len(key) + len(known.file)))
        return known._replace(box=box, dtype=dtype, key=key)

    for name, entry in _pairs(whole["state_dict_metadata"]):
        key = _key(name)
        if _class(entry) == "BytesStorageMetadata":
            made.values[key] = item(key, None, None)
        else:
            dtype, shape, boxes = _stored(entry, budget)
            chunks = tuple(item(key, box, dtype) for box in boxes)
            made.tensors[key] = StoredTensor(key, dtype, shape, chunks)
    return made


def _key(value: Any) -> str:
    if type(value) is not str:  # before it is hashed: a deeply nested tuple ends the process
        raise TypeError("a key is no string")
    return value


def _stored(entry: Any, budget: Budget) -> tuple[str, tuple[int, ...], list[Box]]:
    """Return dtype and shape of a tensor, and of which elements its chunks are."""
    fields = _attributes(entry, "TensorStorageMetadata", budget)
    properties = fields["properties"]
    state = properties.state[-1]
    dtype = state[0] if type(state) is tuple else _fields(properties, budget)["dtype"]
    if type(dtype) is not Global or dtype.module != "torch":
        raise TypeError("a dtype is none of torch")
    shape = _shape(fields["size"])
    chunks = fields["chunks"]
    if type(chunks) is not list:
        raise TypeError("it has no list of chunks")
    budget.spend(len(chunks) * (_ENTRY_COST + _DIMENSION_COST * len(shape)))
    return dtype.name, shape, [_box(chunk, len(shape), budget) for chunk in chunks]


def _box(value: Any, dimensions: int, budget: Budget) -> Box:
    fields = _attributes(value, "ChunkStorageMetadata", budget)
    found = Box(_size(fields["offsets"]), _shape(fields["sizes"]))
    if not len(found.offsets) == len(found.sizes) == dimensions:
        raise ValueError("a chunk has other dimensions than its tensor")
    return found


_NOWHERE = Chunk(None, None, "", 0, 0)


def _location(value: Any, budget: Budget) -> Chunk:
    fields = _attributes(value, "_StorageInfo", budget)
    file, offset, length = fields["relative_path"], fields["offset"], fields["length"]
    if type(file) is not str or not (_is_size(offset) and _is_size(length)):
        raise TypeError("a location is invalid")
    if not is_path(file):
        raise ValueError("no file can have this name")
    noted, known = fields.get("fastserial"), Known(None, None)
    if type(noted) is tuple and len(noted) == len(Known._fields):
        start, crc, strides = noted
        sound = (start is None or _is_size(start)) and (crc is None or _is_size(crc))
        if not sound:
            raise TypeError("what the writer knew is damaged")
        known = Known(start, crc, None if strides is None else _size(strides))
    extended = bool(fields.get("transform_descriptors"))
    return Chunk(None, None, file, offset, length, known.start, known.strides, known.crc, extended)


def _paths(value: Any, budget: Budget) -> dict[str, tuple[str | int, ...]]:
    """Return the paths of keys in the nested state; other planners store anything there."""
    if type(value) is not Mapping:
        return {}
    count = len(value.items)  # no list is longer: each of its entries has a key
    budget.spend(sum(_FIELD_COST * len(path) for _, path in value.items if type(path) is tuple))
    return {
        key: path
        for key, path in value.items
        if type(key) is str
        and type(path) is tuple
        and path
        and all(type(part) is str or (_is_size(part) and part < count) for part in path)
    }


def _class(value: Any) -> str:
    """Return the name of the class of a value, one of torch.distributed.checkpoint."""
    function = value.function
    if not function.module.startswith(_CLASSES):
        raise TypeError(f"{function} is no class of torch.distributed.checkpoint")
    return str(function.name)


def _attributes(value: Any, name: str, budget: Budget) -> dict[str, Any]:
    if type(value) is not Call or _class(value) != name:
        raise TypeError(f"it is no {name}")
    return _fields(value, budget)


def _fields(value: Call, budget: Budget) -> dict[str, Any]:
    budget.spend(_FIELD_COST * sum(len(state.items) for state in value.state))
    return {key: one for state in value.state for key, one in state.items if type(key) is str}


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, Mapping | Call):
        raise TypeError("it is no dictionary")
    return value.items


def _size(value: Any) -> tuple[int, ...]:
    numbers = value.arguments[0] if type(value) is Call else value
    if type(numbers) is not tuple or len(numbers) > MOST_DIMENSIONS:
        raise TypeError("it is no size")
    if not all(map(_is_size, numbers)):
        raise TypeError("it is no size")
    return numbers


def _shape(value: Any) -> tuple[int, ...]:
    """Return a size whose elements can be counted."""
    sizes = _size(value)
    if element_count(sizes) is None:
        raise ValueError("it has more elements than a tensor can have")
    return sizes


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= LARGEST
