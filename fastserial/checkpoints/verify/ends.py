"""The end of a zip file: central directory, end records, serialization id."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping

from fastserial.checkpoints.verify.report import Problem
from fastserial.errors import CorruptCheckpointError
from fastserial.formats.source import Source
from fastserial.formats.zip import structs
from fastserial.formats.zip.directory import (
    Directory,
    RecordEntry,
    parse_local_header,
)
from fastserial.formats.zip.layout import ID_RECORD, fold
from fastserial.formats.zip.structs import DEFLATED, LOCAL, UTF8

__all__ = ["check_end", "check_entries", "expected_id", "is_plain", "is_torch_made"]

_PLAIN = (0, 0, 0, 0, 0, 0, 0)
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


def check_end(
    directory: Directory, tail: bytes, torch_made: bool, remark: Callable[[str], None]
) -> Iterator[Problem]:
    """Check the records after the central directory.

    Args:
        directory: what was read.
        tail: what follows it, or its end.
        torch_made: hold it against what torch writes, byte for byte.
        remark: takes what is odd, but passed over by those who read the file.
    """
    end = directory.end
    start = end.directory_offset + end.directory_size
    comment = 0
    if torch_made:
        if tail[: structs.END_BYTES] != structs.end_records(
            len(directory.records), end.directory_size, end.directory_offset
        ):
            yield Problem(
                "directory", "the records at the end of the file are damaged", None, start
            )
            return
    else:
        first = end.zip64_offset if end.zip64_offset is not None else end.offset
        if first != start:
            remark(f"{first - start} bytes after the directory belong to nothing")
        if not end.agrees:
            yield Problem("directory", "the end records disagree", None, end.offset)
        (comment,) = struct.unpack_from("<H", tail, len(tail) - end.trailing - 2)
        if comment > end.trailing:
            yield Problem("truncated", "its comment is cut short", None, end.offset)
    if comment < end.trailing:
        remark(f"{end.trailing - comment} bytes after the end of the archive belong to nothing")


def expected_id(records: list[RecordEntry], heads: Mapping[int, bytes]) -> str:
    """Return the second half of the serialization id (20 digits), from the directory's CRCs.

    Args:
        records: in the order of the file.
        heads: first 8 bytes of the records that begin like a data descriptor, by index.
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
