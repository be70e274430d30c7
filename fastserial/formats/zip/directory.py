"""Parsing an untrusted zip container: the offset of each record.

Every offset and size is checked against the file before it is used, memory is bounded by the
size of the directory, and nothing outside the file is read. An archive that torch's own reader
accepts is accepted, unless records overlap. `fastserial.verify` checks more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fastserial.errors import (
    CorruptCheckpointError,
    TruncatedCheckpointError,
    UnreadableCheckpointError,
)
from fastserial.formats.source import Source
from fastserial.formats.zip import structs
from fastserial.formats.zip.structs import CENTRAL, DEFLATED, LOCAL, REFUSED, STORED, U16, U32

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
        return bool(self.flags & structs.HAS_DESCRIPTOR)


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


# -- the end of the file -----------------------------------------------------------------------


def _read_end(source: Source) -> EndRecords:
    size = source.size
    reach = min(size, _REACH)
    tail = source.read_at(size - reach, reach)
    found = tail.rfind(structs.END_SIGNATURE, 0, max(0, reach - structs.END.size + 4))
    if found < 0:
        raise TruncatedCheckpointError(
            "failed finding central directory: the file is truncated, or no zip archive"
        )
    at = size - reach + found
    _, disk, start_disk, few, count, length, offset, _ = structs.END.unpack_from(tail, found)
    trailing = size - at - structs.END.size
    stored = (count, length, offset)
    zip64 = _read_zip64_end(source, at)
    disks = (0,) if zip64 is None else (0, U16)
    if disk not in disks or start_disk not in disks or few != count:
        raise UnreadableCheckpointError("archives in several parts are not supported")
    if zip64 is None:
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
    if end < structs.LOCATOR.size:
        return None
    signature, disk, at, _ = structs.LOCATOR.unpack(
        source.read_at(end - structs.LOCATOR.size, structs.LOCATOR.size)
    )
    if signature != structs.LOCATOR_SIGNATURE:
        return None
    if disk != 0 or at + structs.END64.size > end - structs.LOCATOR.size:
        raise CorruptCheckpointError("the zip64 locator points outside the file")
    fields = structs.END64.unpack(source.read_at(at, structs.END64.size))
    signature, _, _, _, disk, start_disk, few, count, length, offset = fields
    if signature != structs.END64_SIGNATURE:
        raise CorruptCheckpointError("there is no zip64 end record where its locator points")
    if disk != 0 or start_disk != 0 or few != count:
        raise UnreadableCheckpointError("archives in several parts are not supported")
    return at, (count, length, offset)


# -- the central directory ---------------------------------------------------------------------


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
        if fields[0] != structs.CENTRAL_SIGNATURE or stop > len(raw):
            raise CorruptCheckpointError(
                f"entry {index} of the central directory is damaged",
                offset=end.directory_offset + at,
            )
        name = raw[at + CENTRAL.size : extra_at]
        if not index:
            prefix = name.partition(b"/")[0] + b"/"
        entries.append(_entry(fields, prefix, name, raw[extra_at:stop], end))
        at = stop
    if at != len(raw):
        raise CorruptCheckpointError(
            f"the central directory holds {len(raw) - at} bytes more than its {end.records} records"
        )
    return entries


def _entry(
    fields: tuple[int, ...], prefix: bytes, name: bytes, extra: bytes, end: EndRecords
) -> RecordEntry:
    _, made, needed, flags, method, time, date, crc, packed, size = fields[:10]
    disk, internal, external, header = fields[13:]
    if extra and U32 in (packed, size, header):
        values = structs.zip64_values(extra[: fields[11]])
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
    elif method == DEFLATED and size > packed * structs.MOST_INFLATED:
        problem = f"{size} bytes cannot come from {packed} in the file"
    if problem:
        raise CorruptCheckpointError(problem, record=_text(name))
    stamp = (made, needed, time, date, disk, internal, external)
    inside = _text(name[len(prefix) :] if name.startswith(prefix) else b"/" + name)
    return RecordEntry(inside, name, header, 0, size, packed, crc, method, flags, stamp, extra)


# -- local headers -----------------------------------------------------------------------------


def parse_local_header(data: bytes, record: str) -> LocalHeader:
    """Return the local header that `data` starts with; name and extra field may be cut short.

    Raises:
        CorruptCheckpointError: there is none.
    """
    if len(data) < LOCAL.size or data[:4] != structs.LOCAL_SIGNATURE:
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
    if entry.flags & structs.HAS_DESCRIPTOR:
        descriptor = structs.descriptor_form(entry.size, entry.header_offset).size
    at = limit - descriptor - entry.compressed_size
    return at if least <= at <= least + U16 else None
