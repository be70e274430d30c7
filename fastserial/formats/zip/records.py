"""Records of a zip checkpoint: their bytes, and which of them torch reads by name."""

from __future__ import annotations

import zlib

from fastserial.errors import CorruptCheckpointError, UnreadableCheckpointError
from fastserial.formats.source import BytesSource, ByteStream, Source
from fastserial.formats.zip.directory import (
    Directory,
    RecordEntry,
    parse_local_header,
    read_directory,
)
from fastserial.formats.zip.structs import LOCAL

PICKLE = "data.pkl"
_PARTS = (PICKLE, "byteorder", "version", ".data/version")
_MOST_INFLATED = 256 * 1024 * 1024


def read_record(source: Source, record: RecordEntry, most: int) -> bytes:
    """Return the bytes of a record of at most `most` bytes, decompressed if need be.

    Raises:
        CorruptCheckpointError: it is damaged.
        UnreadableCheckpointError: it is larger, or torch cannot read its compression.
        OSError: the file cannot be read.
    """
    if record.size > most:
        raise UnreadableCheckpointError(f"larger than {most} bytes", record=record.name)
    if not record.is_readable:
        raise UnreadableCheckpointError(
            "encrypted, or compressed with a method that torch cannot read", record=record.name
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


def read_places(source: Source) -> Directory:
    """Return the central directory, local headers read only if the writer was not torch.

    Raises:
        CorruptCheckpointError: the container is not to be trusted.
        UnreadableCheckpointError: parts of the checkpoint have one name, as torch compares them
            (without case), and differ: only torch's reader decides which it uses.
        OSError: the file cannot be read.
    """
    directory = read_directory(source, headers=False)
    first = next((record for record in directory.records if record.size), None)
    if first is not None and not _is_placed(source, first):
        directory = read_directory(source)
    seen: dict[str, RecordEntry] = {}
    for record in directory.records:
        name = record.name.lower()
        other = seen.setdefault(name, record)
        if other is record or not is_part(name):
            continue
        if (other.size, other.crc) != (record.size, record.crc) or not record.crc:
            text = "several records have this name: use torch.load, which takes one of them"
            raise UnreadableCheckpointError(text, record=record.name)
    return directory


def _is_placed(source: Source, record: RecordEntry) -> bool:
    raw = source.read_at(record.header_offset, LOCAL.size + len(record.full_name))
    header = parse_local_header(raw, record.name)
    return record.header_offset + header.length == record.data_offset


def is_part(name: str) -> bool:
    """Return whether a record of this name is part of a checkpoint: torch reads it, or may."""
    return name in _PARTS or name.startswith("data/")


def storage_records(directory: Directory) -> list[RecordEntry]:
    """Return the records that hold storages as they are: stored and not empty."""
    return [
        record
        for record in directory.records
        if record.size and record.is_stored and record.name.startswith("data/")
    ]


def all_checksums(directory: Directory) -> bool:
    """Return whether every record has a checksum: not with `set_crc32_options` or `skip_data`."""
    return all(record.crc for record in directory.records if record.size)
