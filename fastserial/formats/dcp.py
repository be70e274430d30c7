"""`.metadata` of torch.distributed.checkpoint, parsed without unpickling it.

It is a pickle of torch's classes. Our writer appends a checksum, which unpickling ignores, and adds
an attribute to each item (`Known`). Values may be mentioned any number of times, so chunks and
names are counted, and charged to the budget of the pickle, before they are made.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fastserial.checksums import check_crc, crc32
from fastserial.errors import CorruptCheckpointError
from fastserial.formats.pickles import Budget, Call, Decoded, Global, Limits, Mapping, decode
from fastserial.formats.source import BytesSource, ByteStream, is_path, naming
from fastserial.formats.tensors import ITEM_BYTES, LARGEST, MOST_DIMENSIONS, element_count
from fastserial.interrupts import ours

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
        start: offset of its bytes in the item; None: only `torch.load` can find it.
        crc: CRC-32 of the tensor's bytes, or without `start` of the whole item; None: not taken.
        strides: of a tensor that is not contiguous.
    """

    start: int | None
    crc: int | None
    strides: tuple[int, ...] | None = None


class Chunk(NamedTuple):
    """A chunk of a tensor: the elements from `offsets` on, `sizes` of them in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return element_count(self.sizes) or 0


class Stored(NamedTuple):
    """A tensor: name of its dtype (`float32`), shape, and its chunks."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return element_count(self.shape) or 0


class Item(NamedTuple):
    """A chunk of a tensor, or a value, and its location.

    Attributes:
        key: of the tensor or value.
        chunk: its elements; None: it is a value, pickled.
        dtype: of the tensor; None: it is a value.
        file: name of the file in the folder.
        offset, length: of the item there (bytes).
        known: what our writer knew of it, None from another writer.
        is_extended: an extension of stock's writer, such as a compression, processed it.
    """

    key: str
    chunk: Chunk | None
    dtype: str | None
    file: str
    offset: int
    length: int
    known: Known | None
    is_extended: bool

    @property
    def name(self) -> str:
        """Its name in errors."""
        if self.chunk is None or not any(self.chunk.offsets):
            return self.key
        return f"{self.key} at {list(self.chunk.offsets)}"

    @property
    def nbytes(self) -> int | None:
        """Bytes of the tensor's elements; None if it is a value, or of a dtype we do not know."""
        if self.chunk is None or self.dtype not in ITEM_BYTES:
            return None
        return self.chunk.numel * ITEM_BYTES[self.dtype]


@dataclass(slots=True)
class Metadata:
    """What `.metadata` says.

    Attributes:
        tensors: by key, in the order of the file.
        values: keys of what is no tensor.
        paths: the paths of keys in the nested state, as far as they are given.
        items: all chunks and values that have a location.
        missing: names of chunks and values that have none.
        version: of the layout.
        framed: it has a checksum (which is right).
        globals: the names that unpickling it would import.
    """

    tensors: dict[str, Stored]
    values: list[str]
    paths: dict[str, tuple[str | int, ...]]
    items: list[Item]
    missing: list[str]
    version: str | None
    framed: bool
    globals: frozenset[Global]


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


_Location = tuple[str, int, int, "Known | None", bool]
_NOWHERE: _Location = ("", 0, 0, None, False)


def _metadata(found: Decoded, framed: bool, budget: Budget) -> Metadata:
    whole = _attributes(found.value, "Metadata", budget)
    locations: dict[tuple[str, tuple[int, ...] | None], _Location] = {}
    for index, location in _pairs(whole.get("storage_data") or Mapping()):
        named = _attributes(index, "MetadataIndex", budget)
        offset = named.get("offset")
        where = None if offset is None else _size(offset)
        budget.spend(_ENTRY_COST + _DIMENSION_COST * len(where or ()))
        locations[_key(named["fqn"]), where] = _location(location, budget)
    version, paths = whole.get("version"), _paths(whole.get("planner_data"), budget)
    version = version if type(version) is str else None
    made = Metadata({}, [], paths, [], [], version, framed, found.globals)
    for name, entry in _pairs(whole["state_dict_metadata"]):
        key, dtype = _key(name), None
        chunks: Sequence[Chunk | None] = (None,)
        if _class(entry) == "BytesStorageMetadata":
            made.values.append(key)
        else:
            stored = made.tensors[key] = _stored(entry, budget)
            dtype, chunks = stored.dtype, stored.chunks
        for chunk in chunks:
            known = locations.pop((key, chunk and chunk.offsets), None)
            names = len(key) + len(known[0] if known else "")
            budget.spend(_ITEM_COST + _CHARACTER_COST * names)
            item = Item(key, chunk, dtype, *(known or _NOWHERE))
            if known is None:
                made.missing.append(item.name)
            else:
                made.items.append(item)
    return made


def _key(value: Any) -> str:
    if type(value) is not str:  # before it is hashed: a deeply nested tuple ends the process
        raise TypeError("a key is no string")
    return value


def _stored(entry: Any, budget: Budget) -> Stored:
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
    made = tuple(_chunk(chunk, len(shape), budget) for chunk in chunks)
    return Stored(dtype.name, shape, made)


def _chunk(value: Any, dimensions: int, budget: Budget) -> Chunk:
    fields = _attributes(value, "ChunkStorageMetadata", budget)
    found = Chunk(_size(fields["offsets"]), _shape(fields["sizes"]))
    if not len(found.offsets) == len(found.sizes) == dimensions:
        raise ValueError("a chunk has other dimensions than its tensor")
    return found


def _location(value: Any, budget: Budget) -> _Location:
    fields = _attributes(value, "_StorageInfo", budget)
    file, offset, length = fields["relative_path"], fields["offset"], fields["length"]
    if type(file) is not str or not (_is_size(offset) and _is_size(length)):
        raise TypeError("a location is invalid")
    if not is_path(file):
        raise ValueError("no file can have this name")
    noted, known = fields.get("fastserial"), None
    if type(noted) is tuple and len(noted) == len(Known._fields):
        start, crc, strides = noted
        sound = (start is None or _is_size(start)) and (crc is None or _is_size(crc))
        if not sound:
            raise TypeError("what the writer knew is damaged")
        known = Known(start, crc, None if strides is None else _size(strides))
    return file, offset, length, known, bool(fields.get("transform_descriptors"))


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
