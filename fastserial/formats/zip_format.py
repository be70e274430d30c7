"""torch's zip container, as an untrusted file: its structures, its directory, its records.

Every offset and size is checked against the file before it is used, memory is bounded by the
size of the directory, and nothing outside the file is read. A well-formed archive that torch's own
reader accepts is accepted; others torch may still load. `fastserial.verify` checks more.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fastserial.config.performance import STREAM_CHUNK
from fastserial.errors import (
    CorruptCheckpointError,
    TruncatedCheckpointError,
    UnreadableCheckpointError,
)
from fastserial.formats.source import BytesSource, ByteStream, Source
from fastserial.interrupts import ours

U16, U32 = 0xFFFF, 0xFFFFFFFF  # also: "the value is in the zip64 record"
STORED, DEFLATED = 0, 8
HAS_DESCRIPTOR, UTF8 = 0x0008, 0x0800
REFUSED = 0x2061  # by torch: encrypted (three flags), or compressed as a patch
MOST_INFLATED = 1040  # deflate makes at most 1032 bytes from one

LOCAL_SIGNATURE = b"PK\x03\x04"
CENTRAL_SIGNATURE = b"PK\x01\x02"
DESCRIPTOR_SIGNATURE = b"PK\x07\x08"
END_SIGNATURE = b"PK\x05\x06"
END64_SIGNATURE = b"PK\x06\x06"
LOCATOR_SIGNATURE = b"PK\x06\x07"
DIGITAL_SIGNATURE = b"PK\x05\x05"  # behind the entries; the length of what follows has two bytes

LOCAL = struct.Struct("<4sHHHHHIIIHH")
LOCAL_LENGTHS = struct.Struct("<4s22xHH")  # of it: the signature, the lengths of name and extra
CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
DESCRIPTOR = struct.Struct("<4sIII")
DESCRIPTOR64 = struct.Struct("<4sIQQ")
END64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR = struct.Struct("<4sIQI")
END = struct.Struct("<4sHHHHIIH")
FIELD = struct.Struct("<HH")  # before each part of an extra field: its kind and its length

ZIP64 = 1  # a kind of extra field


def descriptor_form(size: int, header_offset: int) -> struct.Struct:
    """Return the form of the data descriptor that torch writes behind a record (bytes)."""
    return DESCRIPTOR64 if size >= U32 or header_offset >= U32 else DESCRIPTOR


def zip64_values(extra: bytes) -> list[int]:
    """Return the 64-bit values of the zip64 part of an extra field, [] without one."""
    at = 0
    while at + FIELD.size <= len(extra):
        kind, length = FIELD.unpack_from(extra, at)
        at += FIELD.size
        if kind == ZIP64:
            count = min(length, len(extra) - at) // 8
            return list(struct.unpack_from(f"<{count}Q", extra, at))
        at += length
    return []


# -- the directory -------------------------------------------------------------------------------

MAX_DIRECTORY_BYTES = 512 * 1024 * 1024  # about 8 million records
_REACH = 4096 + 16 * 4093  # how far from the end of the file torch's reader looks (bytes)

Stamp = tuple[int, int, int, int, int, int, int]


class RecordEntry(NamedTuple):
    """One record, as the central directory has it. Offsets and sizes are bytes.

    Attributes:
        name: name without the archive name before it, such as `data/0`; a name with another
            beginning, which torch cannot reach, is given as stored, after a `/`.
        full_name: name as stored.
        header_offset: where the local header starts.
        data_offset: where the data starts.
        size: bytes of the data once read.
        compressed_size: bytes in the file; the same as `size` unless `method` is `DEFLATED`.
        crc: CRC-32 of the data.
        method: `STORED` (all that torch writes), `DEFLATED`, or one that torch cannot read.
        flags: general purpose bits.
        stamp: fields that readers ignore: versions made by and needed, time, date, disk number,
            internal and external attributes. All 0 in what torch writes.
        extra: the central entry's extra field and comment.
    """

    name: str
    full_name: bytes
    header_offset: int
    data_offset: int
    size: int
    compressed_size: int
    crc: int
    method: int
    flags: int
    stamp: Stamp
    extra: bytes

    @property
    def data_end(self) -> int:
        """First byte after the data."""
        return self.data_offset + self.compressed_size

    @property
    def is_stored(self) -> bool:
        """Whether the file holds the data uncompressed."""
        return self.method == STORED and not self.flags & REFUSED

    @property
    def is_readable(self) -> bool:
        """Whether torch can read it: it is not encrypted, and stored or deflated."""
        return self.method in (STORED, DEFLATED) and not self.flags & REFUSED

    @property
    def has_descriptor(self) -> bool:
        """Whether CRC and sizes are repeated after the data."""
        return bool(self.flags & HAS_DESCRIPTOR)


class EndRecords(NamedTuple):
    """The records at the end of the file.

    Attributes:
        records: how many the directory holds.
        directory_offset, directory_size: of the central directory (bytes).
        offset: of the end record.
        trailing: bytes after the end record, its comment included.
        agrees: the zip64 record and the end record do not contradict each other.
    """

    records: int
    directory_offset: int
    directory_size: int
    offset: int
    trailing: int
    agrees: bool


class Directory(NamedTuple):
    """All records of an archive.

    Attributes:
        archive_name: the part before the `/` in the first record's name.
        records: in the order of the central directory; several may have the same name.
        size: size of the file (bytes).
        end: the records at the end of the file.
    """

    archive_name: str
    records: Sequence[RecordEntry]
    size: int
    end: EndRecords

    def find(self, name: str) -> RecordEntry | None:
        """Return the record called `name` (without the archive name), or None."""
        return next((record for record in self.records if record.name == name), None)

    def in_file_order(self) -> list[RecordEntry]:
        """Return the records sorted by offset."""
        return sorted(self.records, key=lambda record: record.header_offset)


class LocalHeader(NamedTuple):
    """A local header; `length` is its size with name and extra field (bytes)."""

    flags: int
    method: int
    when: tuple[int, int]
    crc: int
    compressed_size: int
    size: int
    name: bytes
    extra: bytes
    length: int


def read_directory(source: Source, *, headers: bool = True) -> Directory:
    """Read the directory of a zip archive.

    Args:
        source: the archive, from its first byte on.
        headers: read each record's local header, which alone says where the data starts.
            Without, it is taken from where the next record starts, which is right for records that
            torch wrote, and three reads do for any number of them; others' headers are read.

    Raises:
        CorruptCheckpointError: there is no whole directory, or it is not to be trusted.
        UnreadableCheckpointError: the archive is in several parts, or its directory too large.
        OSError: the file cannot be read.
    """
    end = _read_end(source)
    raw = source.read_at(end.directory_offset, end.directory_size)
    entries = _parse_entries(raw, end)
    archive = entries[0].full_name.partition(b"/")[0]
    records = _located(source, entries, end, headers)
    return Directory(_text(archive), records, source.size, end)


def _text(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def _read_end(source: Source) -> EndRecords:
    size = source.size
    reach = min(size, _REACH)
    tail = source.read_at(size - reach, reach)
    found = tail.rfind(END_SIGNATURE, 0, max(0, reach - END.size + 4))
    if found < 0:
        raise TruncatedCheckpointError(
            "failed finding central directory: the file is truncated, or no zip archive"
        )
    at = size - reach + found
    _, disk, start_disk, few, count, length, offset, _ = END.unpack_from(tail, found)
    trailing = size - at - END.size
    stored = (count, length, offset)
    zip64 = _read_zip64_end(source, at)
    if zip64 is None:
        _refuse_parts(disk, start_disk, few, count)
        end = EndRecords(count, offset, length, at, trailing, True)
        limit = at
    else:
        limit, values = zip64
        agrees = all(
            short in (long, ceiling)
            for short, long, ceiling in zip(stored, values, (U16, U32, U32), strict=True)
        )
        end = EndRecords(values[0], values[2], values[1], at, trailing, agrees)
    if end.directory_offset + end.directory_size > limit:
        raise CorruptCheckpointError("the central directory goes past the end of the file")
    if end.directory_size > MAX_DIRECTORY_BYTES:
        raise UnreadableCheckpointError(
            f"the central directory of {end.directory_size} bytes is larger than "
            f"{MAX_DIRECTORY_BYTES} bytes"
        )
    if end.records == 0:
        raise CorruptCheckpointError("the central directory is empty")
    if end.records * CENTRAL.size > end.directory_size:
        raise CorruptCheckpointError(
            f"the central directory is too small for {end.records} records"
        )
    return end


def _read_zip64_end(source: Source, end: int) -> tuple[int, tuple[int, int, int]] | None:
    """Return the zip64 end record's offset and (count, size, offset), or None without one."""
    if end < LOCATOR.size:
        return None
    signature, _, at, _ = LOCATOR.unpack(source.read_at(end - LOCATOR.size, LOCATOR.size))
    if signature != LOCATOR_SIGNATURE:
        return None
    if at + END64.size > end - LOCATOR.size:
        raise CorruptCheckpointError("the zip64 locator points outside the file")
    fields = END64.unpack(source.read_at(at, END64.size))
    signature, _, _, _, disk, start_disk, few, count, length, offset = fields
    if signature != END64_SIGNATURE:
        raise CorruptCheckpointError("there is no zip64 end record where its locator points")
    _refuse_parts(disk, start_disk, few, count)
    return at, (count, length, offset)


def _refuse_parts(disk: int, start_disk: int, few: int, count: int) -> None:
    if disk or start_disk or few != count:
        raise UnreadableCheckpointError("archives in several parts are not supported")


def _parse_entries(raw: bytes, end: EndRecords) -> list[RecordEntry]:
    """Return the entries; where their data starts is not known yet (0)."""
    entries: list[RecordEntry] = []
    prefix = b""
    at = 0
    for index in range(end.records):
        if at + CENTRAL.size > len(raw):
            raise CorruptCheckpointError(
                f"the central directory ends in record {index} of {end.records}"
            )
        fields = CENTRAL.unpack_from(raw, at)
        extra_at = at + CENTRAL.size + fields[10]
        stop = extra_at + fields[11] + fields[12]
        if fields[0] != CENTRAL_SIGNATURE or stop > len(raw):
            raise CorruptCheckpointError(
                f"entry {index} of the central directory is damaged",
                offset=end.directory_offset + at,
            )
        name = raw[at + CENTRAL.size : extra_at]
        if not index:
            prefix = name.partition(b"/")[0] + b"/"
        entries.append(_entry(fields, prefix, name, raw[extra_at:stop], end))
        at = stop
    if at != len(raw) and not _is_signature(raw[at:]):
        raise CorruptCheckpointError(
            f"the central directory holds {len(raw) - at} bytes more than its {end.records} records"
        )
    return entries


def _is_signature(data: bytes) -> bool:
    """Return whether this is a digital signature, which is not checked."""
    return data[:4] == DIGITAL_SIGNATURE and len(data) == 6 + int.from_bytes(data[4:6], "little")


def _entry(
    fields: tuple[int, ...], prefix: bytes, name: bytes, extra: bytes, end: EndRecords
) -> RecordEntry:
    _, made, needed, flags, method, time, date, crc, packed, size = fields[:10]
    disk, internal, external, header = fields[13:]
    if extra and U32 in (packed, size, header):
        values = zip64_values(extra[: fields[11]])
        wide = [size, packed, header]
        for index, value in enumerate(wide):
            if value == U32 and values:
                wide[index] = values.pop(0)
        size, packed, header = wide
    problem = None
    if header + LOCAL.size + len(name) + packed > end.directory_offset:
        problem = "the record goes past the end of the records"
    elif method == STORED and size != packed and not flags & REFUSED:
        problem = f"stored with sizes {packed} and {size}, which differ"
    elif method == DEFLATED and size > packed * MOST_INFLATED:
        problem = f"{size} bytes cannot come from {packed} in the file"
    if problem:
        raise CorruptCheckpointError(problem, record=_text(name))
    stamp = (made, needed, time, date, disk, internal, external)
    inside = _text(name[len(prefix) :] if name.startswith(prefix) else b"/" + name)
    return RecordEntry(inside, name, header, 0, size, packed, crc, method, flags, stamp, extra)


def parse_local_header(data: bytes, record: str) -> LocalHeader:
    """Return the local header that `data` starts with; name and extra field may be cut short.

    Raises:
        CorruptCheckpointError: there is none.
    """
    if len(data) < LOCAL.size or data[:4] != LOCAL_SIGNATURE:
        raise CorruptCheckpointError("there is no local header at its offset", record=record)
    fields = LOCAL.unpack_from(data)
    _, _, flags, method, time, date, crc, packed, size, name_size, extra_size = fields
    middle = LOCAL.size + name_size
    stop = middle + extra_size
    name, extra = data[LOCAL.size : middle], data[middle:stop]
    return LocalHeader(flags, method, (time, date), crc, packed, size, name, extra, stop)


def _located(
    source: Source, entries: list[RecordEntry], end: EndRecords, headers: bool
) -> list[RecordEntry]:
    """Return the entries with the offset of their data, having checked that none overlap."""
    order = sorted(range(len(entries)), key=lambda index: entries[index].header_offset)
    limits = [entries[index].header_offset for index in order[1:]] + [end.directory_offset]
    offsets = [0] * len(entries)
    for index, limit in zip(order, limits, strict=True):
        entry = entries[index]
        at = None if headers else _implied(entry, limit)
        if at is None:
            at = _header_end(source, entry)
        if at + entry.compressed_size > limit:
            raise CorruptCheckpointError(
                "the record overlaps the next one", record=_text(entry.full_name)
            )
        offsets[index] = at
    # not `_replace`, which takes three times as long
    return [
        RecordEntry._make((*entry[:3], at, *entry[4:]))
        for entry, at in zip(entries, offsets, strict=True)
    ]


def _header_end(source: Source, entry: RecordEntry) -> int:
    raw = source.read_at(entry.header_offset, LOCAL.size + len(entry.full_name))
    name = _text(entry.full_name)
    header = parse_local_header(raw, name)
    if header.name != entry.full_name:
        raise CorruptCheckpointError("its local header has a different name", record=name)
    return entry.header_offset + header.length


def _implied(entry: RecordEntry, limit: int) -> int | None:
    """Return where the data starts if data and descriptor end where the next record begins.

    That holds for what torch wrote; None for a record of another writer.
    """
    if any(entry.stamp):
        return None
    least = entry.header_offset + LOCAL.size + len(entry.full_name)
    descriptor = 0
    if entry.flags & HAS_DESCRIPTOR:
        descriptor = descriptor_form(entry.size, entry.header_offset).size
    at = limit - descriptor - entry.compressed_size
    return at if least <= at <= least + U16 else None


# -- records -------------------------------------------------------------------------------------

PICKLE = "data.pkl"
_PARTS = (PICKLE, "byteorder", "version", ".data/version")
_LEAST_INFLATED = 64 * 1024 * 1024
_INFLATED_RATIO = 16


def most_inflated(nbytes: int) -> int:
    """Return the most bytes that a record which is kept in memory may decompress to.

    Args:
        nbytes: size of the archive.
    """
    return max(_LEAST_INFLATED, _INFLATED_RATIO * nbytes)


def inflated(source: Source, record: RecordEntry) -> Iterator[bytes]:
    """Yield what a deflated record decompresses to, in parts of at most `STREAM_CHUNK` bytes.

    Raises:
        CorruptCheckpointError: it is damaged, or has another size than the directory says.
        OSError: the file cannot be read.
    """
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    left, at, raw = record.size, record.data_offset, b""
    while not inflater.eof and left >= 0:
        if not raw and at < record.data_end:
            raw = source.read_at(at, min(STREAM_CHUNK, record.data_end - at))
            at += len(raw)
        try:
            part = inflater.decompress(raw, STREAM_CHUNK)
        except ours(zlib.error) as error:
            raise CorruptCheckpointError(f"damaged: {error}", record=record.name) from error
        if not part and not raw:
            break  # it is cut short
        raw = inflater.unconsumed_tail
        left -= len(part)
        yield part
    if left or not inflater.eof:
        raise CorruptCheckpointError("its size is not what the directory says", record=record.name)


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
    if record.is_stored:
        return source.read_at(record.data_offset, record.compressed_size)
    return b"".join(inflated(source, record))


def record_stream(source: Source, record: RecordEntry) -> ByteStream:
    """Return the bytes of a record as a stream, to decode a pickle from.

    Raises:
        CorruptCheckpointError: it is compressed, and damaged.
        UnreadableCheckpointError: it is compressed, and larger than `most_inflated`.
        OSError: the file cannot be read.
    """
    if record.is_stored:
        return ByteStream(source, record.data_offset, record.data_end)
    return ByteStream(BytesSource(read_record(source, record, most_inflated(source.size))))


def read_places(source: Source, unique: bool = True, headers: bool = False) -> Directory:
    """Return the central directory, with the place of each record's data as torch finds it.

    Args:
        unique: refuse an archive in which parts of the checkpoint have one name, and differ.
        headers: read all local headers, not only those of other writers than torch.

    Raises:
        CorruptCheckpointError: the container is not to be trusted.
        UnreadableCheckpointError: `unique`, and parts have one name, as torch compares them
            (without case): only torch's reader decides which it uses.
        OSError: the file cannot be read.
    """
    directory = read_directory(source, headers=headers)
    first = next((record for record in directory.records if record.size), None)
    if not headers and first is not None and not _is_placed(source, first):
        directory = read_directory(source)
    twice = next(ambiguous_parts(directory), None) if unique else None
    if twice is not None:
        text = "several records have this name: use torch.load, which takes one of them"
        raise UnreadableCheckpointError(text, record=twice.name)
    return directory


def ambiguous_parts(directory: Directory) -> Iterator[RecordEntry]:
    """Yield parts of a checkpoint that have the name of an earlier one (without case), and differ.

    Readers take one or another.
    """
    seen: dict[str, RecordEntry] = {}
    for record in directory.records:
        name = record.name.lower()
        other = seen.setdefault(name, record)
        if other is record or not is_part(name):
            continue
        unknown = record.size and not record.crc  # saved without a checksum
        if (other.size, other.crc) != (record.size, record.crc) or unknown:
            yield record


def _is_placed(source: Source, record: RecordEntry) -> bool:
    raw = source.read_at(record.header_offset, LOCAL.size + len(record.full_name))
    header = parse_local_header(raw, record.name)
    return record.header_offset + header.length == record.data_offset


def is_part(name: str) -> bool:
    """Return whether a record of this name is part of a checkpoint: torch reads it, or may."""
    return name in _PARTS or name.startswith("data/")


def storage_records(directory: Directory) -> list[RecordEntry]:
    """Return the records that hold storages as they are: stored and not empty.

    Only torch's reader decides which it takes of several with one name (without case): none of them
    is returned.
    """
    counts = Counter(record.name.lower() for record in directory.records)
    return [
        record
        for record in directory.records
        if record.size
        and record.is_stored
        and record.name.startswith("data/")
        and counts[record.name.lower()] == 1
    ]


def all_checksums(directory: Directory) -> bool:
    """Return whether every record has a checksum: not with `set_crc32_options` or `skip_data`."""
    return all(record.crc for record in directory.records if record.size)
