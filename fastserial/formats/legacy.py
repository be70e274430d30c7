"""Parsing the legacy container, which torch wrote before 1.6, without executing a pickle.

Five pickles (magic number, protocol, system, object, sorted keys), then each storage after its
element count. The object's persistent ids give the type and size of each storage, so everything
except the bytes of the storages can be checked. There are no checksums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fastserial.errors import CorruptCheckpointError, TruncatedCheckpointError
from fastserial.formats.extents import COUNT
from fastserial.formats.pickles import Budget, Decoded, Mapping, decode
from fastserial.formats.source import ByteStream, Source
from fastserial.formats.tensors import ITEM_BYTES, StorageEntry, storage_table

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL = 1001


@dataclass(frozen=True, slots=True)
class LegacyFile:
    """A legacy checkpoint.

    Attributes:
        little_endian: byte order of the storages.
        decoded: the pickle of the object.
        object_offset: its offset (bytes).
        storages: by key, in the order of the file, which is that of the sorted keys.
        end: first byte after the last storage.
    """

    little_endian: bool
    decoded: Decoded
    object_offset: int
    storages: dict[str, StorageEntry]
    end: int


def read_legacy(source: Source, budget: Budget | None = None) -> LegacyFile:
    """Read the structure of a legacy checkpoint.

    Args:
        source: the file.
        budget: what the pickles take is charged to; by default that for a small file.

    Raises:
        CorruptCheckpointError: it is damaged; `record` is the storage, where it is one.
        PickleLimitError: its pickles are larger than the limits.
        OSError: the file cannot be read.
    """
    stream, budget = ByteStream(source), budget or Budget()
    magic = decode(stream, budget).value
    if type(magic) is not int or magic != MAGIC:
        raise CorruptCheckpointError("the magic number is wrong", offset=0)
    protocol = decode(stream, budget).value
    if type(protocol) is not int or protocol != PROTOCOL:
        raise CorruptCheckpointError("the protocol version is not 1001")
    little = _byte_order(decode(stream, budget).value)
    object_offset = stream.tell()
    decoded = decode(stream, budget)
    table = storage_table(decoded.persistents)
    keys = _keys(decode(stream, budget).value, table)
    storages, end = _locate(source, keys, table, little, stream.tell())
    return LegacyFile(little, decoded, object_offset, storages, end)


def _byte_order(system: object) -> bool:
    if type(system) is Mapping:
        for name, value in system.items:
            text = name.decode("ascii", "replace") if type(name) is bytes else name
            if type(text) is str and text == "little_endian" and type(value) is bool:
                return value
    raise CorruptCheckpointError("the description of the system that wrote it is damaged")


def _keys(value: object, table: dict[str, StorageEntry]) -> list[str]:
    if type(value) is not list:
        raise CorruptCheckpointError("the list of storages is damaged")
    keys = [key.decode("ascii", "replace") if type(key) is bytes else key for key in value]
    for key in keys:
        if type(key) is not str or key not in table:
            raise CorruptCheckpointError(
                "a storage is listed that no tensor is in",
                record=key if type(key) is str else None,
            )
    if len(set(keys)) < len(keys):
        raise CorruptCheckpointError("a storage is listed twice")
    missing = table.keys() - set(keys)
    if missing:
        raise CorruptCheckpointError(
            f"{len(missing)} storages that tensors are in are not in the list",
            record=min(missing),
        )
    return keys


def _locate(
    source: Source,
    keys: list[str],
    table: dict[str, StorageEntry],
    little_endian: bool,
    start: int,
) -> tuple[dict[str, StorageEntry], int]:
    storages: dict[str, StorageEntry] = {}
    size = source.size
    at = start
    for key in keys:
        entry = table[key]
        if at + COUNT.size > size:
            raise TruncatedCheckpointError(
                f"the file ends at byte {size}, before the storage: truncated", record=key
            )
        raw = source.read_at(at, COUNT.size)
        count = int.from_bytes(raw, "little" if little_endian else "big", signed=True)
        numel = entry.nbytes // ITEM_BYTES[entry.dtype]
        if count != numel:
            raise CorruptCheckpointError(
                f"the file says {count} elements, its tensors {numel}",
                record=key,
                offset=at,
            )
        at += COUNT.size
        if at + entry.nbytes > size:
            raise TruncatedCheckpointError(
                f"the file ends at byte {size}, the storage at {at + entry.nbytes}: truncated",
                record=key,
                offset=at,
            )
        storages[key] = replace(entry, record=key, offset=at, held=entry.nbytes)
        at += entry.nbytes
    return storages, at
