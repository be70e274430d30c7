"""Records of a zip checkpoint: their bytes, and which of them torch finds by name."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import IO, Any, cast

from fastserial.errors import CorruptCheckpointError, UnreadableCheckpointError
from fastserial.formats.byte_stream import ByteStream
from fastserial.formats.source import BytesSource, Source, SourceFile
from fastserial.formats.zip.directory import (
    Directory,
    RecordEntry,
    parse_local_header,
    read_directory,
)
from fastserial.formats.zip.structs import LOCAL

__all__ = [
    "PICKLE",
    "all_checksums",
    "read_places",
    "read_record",
    "record_stream",
    "storage_records",
]

PICKLE = "data.pkl"
_MOST_INFLATED = 256 * 1024 * 1024


def read_record(source: Source, record: RecordEntry, most: int) -> bytes:
    """Return the bytes of a record of at most `most` bytes, decompressed if need be.

    Raises:
        CorruptCheckpointError: it is damaged.
        UnreadableCheckpointError: it is larger, or packed in a way that torch cannot read.
        OSError: the file cannot be read.
    """
    if record.size > most:
        raise UnreadableCheckpointError(f"larger than {most} bytes", record=record.name)
    if not record.is_readable:
        raise UnreadableCheckpointError(
            "encrypted, or compressed in a way that torch cannot read", record=record.name
        )
    raw = source.read_at(record.data_offset, record.compressed_size)
    if record.is_stored:
        return raw
    try:
        data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(raw, record.size + 1)
    except zlib.error as error:
        raise CorruptCheckpointError(f"damaged: {error}", record=record.name) from error
    if len(data) != record.size:
        raise CorruptCheckpointError("its size is not what the directory says", record=record.name)
    return data


def record_stream(source: Source, record: RecordEntry) -> ByteStream:
    """Return the bytes of a record as a stream, to decode a pickle from.

    Raises:
        CorruptCheckpointError: it is compressed, and damaged.
        UnreadableCheckpointError: it is compressed, and larger than 256 MiB.
        OSError: the file cannot be read.
    """
    if record.is_stored:
        return ByteStream(source, record.data_offset, record.data_end)
    return ByteStream(BytesSource(read_record(source, record, _MOST_INFLATED)))


def read_places(source: Source, stock: Any = None) -> Directory:
    """Return the central directory, local headers read only if the writer was not torch.

    Of records with the same name, it holds the one that torch finds.

    Args:
        source: the archive, from its first byte on.
        stock: torch's reader of the same file, if there is one.

    Raises:
        CorruptCheckpointError: the container is not to be trusted.
        OSError: the file cannot be read.
    """
    directory = read_directory(source, headers=False)
    first = next((record for record in directory.records if record.size), None)
    if first is not None and not _is_placed(source, first):
        directory = read_directory(source)
    if len({record.full_name.lower() for record in directory.records}) < len(directory.records):
        return directory._replace(records=_found_by_torch(source, directory.records, stock))
    return directory


def _found_by_torch(
    source: Source, records: Sequence[RecordEntry], stock: Any
) -> list[RecordEntry]:
    """Return the records that torch's reader finds by name, which it compares without case."""
    import torch  # here, since whoever only verifies needs it as good as never

    named: dict[bytes, list[RecordEntry]] = {}
    for record in records:
        named.setdefault(record.full_name.lower(), []).append(record)
    found: list[RecordEntry] = []
    try:
        reader: Any = stock or torch._C.PyTorchFileReader(cast("IO[bytes]", SourceFile(source)))
        for group in named.values():
            if len(group) == 1:
                found += group
                continue
            places = {record.data_offset: record for record in group}
            for name in {record.name: None for record in group}:
                place = places.get(reader.get_record_offset(name))
                if place is not None:
                    found.append(place._replace(name=name))
    except RuntimeError as error:
        raise CorruptCheckpointError(f"torch cannot read the archive: {error}") from error
    return found


def _is_placed(source: Source, record: RecordEntry) -> bool:
    raw = source.read_at(record.header_offset, LOCAL.size + len(record.full_name))
    header = parse_local_header(raw, record.name)
    return record.header_offset + header.length == record.data_offset


def storage_records(directory: Directory) -> list[RecordEntry]:
    """Return the records that hold storages as they are: stored and not empty."""
    return [
        record
        for record in directory.records
        if record.size and record.is_stored and record.name.startswith("data/")
    ]


def all_checksums(directory: Directory) -> bool:
    """Tell whether every record has a checksum: not with `set_crc32_options` or `skip_data`."""
    return all(record.crc for record in directory.records if record.size)
