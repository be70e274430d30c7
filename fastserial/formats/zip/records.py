"""From an open checkpoint to the outline of what it holds. No pickle is executed."""

from __future__ import annotations

import zlib

from fastserial.containers.directory import Directory, RecordEntry, read_exactly
from fastserial.errors import CorruptCheckpointError
from fastserial.outline import Outline, outline
from fastserial.pickles import ByteStream, Limits, decode

__all__ = ["PICKLE", "read_record", "record_stream", "zip_outline"]

PICKLE = "data.pkl"
_MOST_INFLATED = 256 * 1024 * 1024


def read_record(fd: int, record: RecordEntry, most: int) -> bytes:
    """Return the bytes of a record of at most `most` bytes, decompressed if need be.

    Raises:
        CorruptCheckpointError: it is larger, or damaged.
        OSError: the file cannot be read.
    """
    if record.size > most:
        raise CorruptCheckpointError(f"larger than {most} bytes", record=record.name)
    if not record.is_readable:
        raise CorruptCheckpointError(
            "encrypted, or compressed in a way that torch cannot read", record=record.name
        )
    raw = read_exactly(fd, record.data_offset, record.compressed_size)
    if record.is_stored:
        return raw
    try:
        data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(raw, record.size + 1)
    except zlib.error as error:
        raise CorruptCheckpointError(f"damaged: {error}", record=record.name) from error
    if len(data) != record.size:
        raise CorruptCheckpointError("its size is not what the directory says", record=record.name)
    return data


def record_stream(fd: int, record: RecordEntry) -> ByteStream:
    """Return the bytes of a record as a stream, to decode a pickle from.

    Raises:
        CorruptCheckpointError: it is compressed, and damaged or larger than 256 MiB.
        OSError: the file cannot be read.
    """
    if record.is_stored:
        return ByteStream(
            lambda offset, length: read_exactly(fd, offset, length),
            record.data_offset,
            record.data_end,
        )
    data = read_record(fd, record, _MOST_INFLATED)
    return ByteStream(lambda offset, length: data[offset : offset + length], 0, len(data))


def zip_outline(fd: int, directory: Directory, limits: Limits | None = None) -> Outline | None:
    """Return what a zip checkpoint's pickle tells of its tensors, None if it has no pickle.

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
        raise CorruptCheckpointError("several records bear this name, and differ", record=PICKLE)
    try:
        return outline(decode(record_stream(fd, record), limits), limits)
    except CorruptCheckpointError as error:
        if error.record is None:
            error.record = PICKLE
        raise
