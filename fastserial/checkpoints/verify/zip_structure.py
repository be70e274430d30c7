"""The structure of a zip archive: all that is around the data of its records.

Between the data of two records are a data descriptor and a local header, behind the last the
central directory and the end records; one record is an id made from all checksums. What torch
writes there follows from the directory: it is made again and compared. Of what other programs write
only the records are checked, and what keeps torch from reading them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence

from fastserial.checkpoints.verify.report import Problem
from fastserial.errors import CorruptCheckpointError
from fastserial.formats.source import Source
from fastserial.formats.zip import structs
from fastserial.formats.zip.directory import Directory, RecordEntry, parse_local_header
from fastserial.formats.zip.layout import ID_RECORD, fold
from fastserial.formats.zip.structs import DEFLATED, FIELD, LOCAL, U16, UTF8

__all__ = [
    "LONGEST_GAP",
    "check_end",
    "check_entries",
    "check_entries_loosely",
    "check_gap",
    "expected_id",
    "is_plain",
    "is_torch_made",
]

_PLAIN = (0, 0, 0, 0, 0, 0, 0)
_IS_FOLDER = 0x10  # in the external attributes
_DEFLATED = (0, 20, 0, 0, 0, 0, 0)  # the code in a TorchScript archive


def is_plain(record: RecordEntry) -> bool:
    """Return whether an entry looks like torch's: no versions, times or attributes."""
    return record.stamp == _stamp(record) and record.flags == _flags(record)


def _stamp(record: RecordEntry) -> tuple[int, ...]:
    return _DEFLATED if record.method == DEFLATED else _PLAIN


def _flags(record: RecordEntry) -> int:
    return UTF8 | structs.HAS_DESCRIPTOR if record.size else UTF8


def is_torch_made(source: Source, directory: Directory) -> bool:
    """Return whether torch wrote the archive, and nobody changed it since.

    Most entries look like torch's then, and no other bears a date that its local header bears,
    too: that is no damage, but another program's work.

    Raises:
        OSError: the file cannot be read.
    """
    others = [record for record in directory.records if not is_plain(record)]
    if 2 * len(others) >= len(directory.records):
        return False
    return not any(_is_dated(source, record) for record in others)


def _is_dated(source: Source, record: RecordEntry) -> bool:
    when = record.stamp[2:4]
    if not any(when):
        return False
    length = LOCAL.size + len(record.full_name)
    try:
        header = parse_local_header(source.read_at(record.header_offset, length), record.name)
    except CorruptCheckpointError:
        return False
    return header.name == record.full_name and header.stamp[1:] == when


def check_entries(directory: Directory) -> Iterator[Problem]:
    """Compare the directory's entries with what torch writes into them."""
    for record in directory.records:
        sound = is_plain(record) and (record.size > 0 or record.crc == 0)
        wide = structs.zip64_field(record.size, record.compressed_size, record.header_offset)
        if not sound or record.extra != wide:
            yield Problem("directory", "fields of its entry are damaged", record.name)


def check_entries_loosely(directory: Directory) -> Iterator[Problem]:
    """Look for entries of other writers for which torch's reader does not read the data."""
    for record in directory.records:
        disk, _, attributes = record.stamp[4:]
        if disk not in (0, 1):
            text = "its entry says that it is in another part of the archive"
            yield Problem("directory", text, record.name)
        elif attributes & _IS_FOLDER and record.size:
            yield Problem("directory", "its entry says that it is a folder", record.name)


def check_end(directory: Directory, tail: bytes, torch_made: bool) -> Iterator[Problem]:
    """Check the records after the central directory.

    Args:
        directory: what was read.
        tail: what follows it, or its end.
        torch_made: hold it against what torch writes, byte for byte.
    """
    end = directory.end
    if torch_made:
        start = end.directory_offset + end.directory_size
        if tail[: structs.END_BYTES] != structs.end_records(
            len(directory.records), end.directory_size, end.directory_offset
        ):
            yield Problem(
                "directory", "the records at the end of the file are damaged", None, start
            )
        return
    if not end.agrees:
        yield Problem("directory", "the end records disagree", None, end.offset)
    (comment,) = struct.unpack_from("<H", tail, len(tail) - end.trailing - 2)
    if comment > end.trailing:
        yield Problem("truncated", "its comment is cut short", None, end.offset)


def expected_id(records: Sequence[RecordEntry], heads: Mapping[int, bytes]) -> str:
    """Return the second half of the serialization id (20 digits), from the directory's CRCs.

    Args:
        records: in the order of the file.
        heads: first 8 bytes of records, by index; of those that begin like a data descriptor.
    """
    combined = 0
    for index, record in enumerate(records):
        if record.size == 0 or record.name == ID_RECORD:
            continue
        head = heads.get(index, b"")
        if head[:4] == structs.DESCRIPTOR_SIGNATURE and len(head) == 8:
            combined = fold(combined, int.from_bytes(head[4:], "little"))
        combined = fold(combined, record.crc)
    return f"{combined:020d}"


# -- between the records -------------------------------------------------------------------------


# A descriptor, a header, a name and an extra field of the greatest lengths.
LONGEST_GAP = structs.DESCRIPTOR64.size + LOCAL.size + 2 * U16


def check_gap(
    before: RecordEntry | None, after: RecordEntry | None, data: bytes, start: int
) -> Iterator[Problem]:
    """Compare what lies between two records with what torch writes there, byte for byte.

    Args:
        before: the record whose data ends where `data` starts.
        after: the record whose data starts where `data` ends.
        data: the bytes.
        start: their offset in the file.
    """
    descriptor = b""
    if before is not None and before.has_descriptor:
        sizes = before.compressed_size, before.size
        descriptor = structs.descriptor(before.crc, *sizes, before.header_offset)
    header = after.header_offset - start if after is not None else len(data)
    if before is not None and data[: min(header, len(descriptor))] != descriptor:
        text = "its data descriptor is not what the directory says"
        yield Problem("descriptor", text, before.name, start)
    if header > len(descriptor):
        where = f"after {before.name}" if before is not None else "at the beginning"
        text = f"{header - len(descriptor)} bytes {where} belong to no record"
        yield Problem("unaccounted", text, None, start + len(descriptor))
    if after is not None and data[header:] != _header(after, len(data) - header):
        text = "its local header is not what the directory says"
        yield Problem("header", text, after.name, after.header_offset)


def _header(record: RecordEntry, length: int) -> bytes | None:
    """Return the local header of `length` bytes that torch writes, None if there is none."""
    zip64 = len(structs.zip64_field(record.size, 0, record.header_offset))
    extra = length - LOCAL.size - len(record.full_name)
    padding = extra - zip64 - FIELD.size
    if padding < 0 or extra > U16:
        return None
    kind = record.flags, record.method, record.stamp[1]
    return structs.local_header(record.full_name, record.size, record.header_offset, padding, *kind)
