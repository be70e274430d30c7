"""The bytes between the data of two records: a data descriptor and a local header.

Together with the data (CRC-32) and the directory (see `ends`) they are every byte of the file. What
torch writes there follows from the directory: it is made again and compared. What other programs
write differs, and only what makes a difference to a reader is damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fastserial.checkpoints.verify.report import Problem
from fastserial.errors import CorruptCheckpointError
from fastserial.formats.zip import structs
from fastserial.formats.zip.directory import LocalHeader, RecordEntry, parse_local_header
from fastserial.formats.zip.structs import FIELD, HAS_DESCRIPTOR, LOCAL, U16, U32

__all__ = ["LONGEST_GAP", "check_gap", "check_gap_loosely"]

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


def check_gap_loosely(
    before: RecordEntry | None,
    after: RecordEntry | None,
    data: bytes,
    start: int,
    remark: Callable[[str], None],
) -> Iterator[Problem]:
    """Compare what lies between two records with what the directory says of them.

    Args:
        before, after, data, start: as `check_gap`.
        remark: takes what is odd, but passed over by those who read the file.
    """
    used = 0
    header = (after.header_offset - start) if after is not None else len(data)
    if before is not None and before.has_descriptor:
        used = _descriptor_length(before, data, header)
        if not used:
            remark("a data descriptor is missing, or differs from the directory")
            used = header
    if header > used:
        remark(f"{header - used} bytes at {start + used} belong to no record")
    if after is None:
        return
    try:
        found = parse_local_header(data[header:], after.name)
    except CorruptCheckpointError as error:
        yield Problem("header", error.message, after.name, after.header_offset)
        return
    message = _difference(after, found)
    if message is not None:
        yield Problem("header", message, after.name, after.header_offset)


def _descriptor_length(record: RecordEntry, data: bytes, length: int) -> int:
    """Return the length of the descriptor that `data` starts with, 0 if it is not right.

    Of an empty record it may have several lengths: it is `length` bytes then, if it can be.
    """
    found = 0
    sizes = record.compressed_size, record.size
    for form in (
        (structs.DESCRIPTOR64,) if max(sizes) > U32 else (structs.DESCRIPTOR, structs.DESCRIPTOR64)
    ):
        signed = form.pack(structs.DESCRIPTOR_SIGNATURE, record.crc, *sizes)
        for expected in (signed, signed.removeprefix(structs.DESCRIPTOR_SIGNATURE)):
            if data.startswith(expected) and (not found or len(expected) == length):
                found = len(expected)
    return found


def _difference(record: RecordEntry, header: LocalHeader) -> str | None:
    """Return how a reader that goes by the local header gets something else, or None."""
    if header.name != record.full_name:
        return "its local header has a different name"
    if header.method != record.method or (header.flags ^ record.flags) & structs.REFUSED:
        return "its local header has another compression than the directory"
    if header.flags & HAS_DESCRIPTOR:
        return None  # sizes and CRC follow the data
    sizes = [header.size, header.compressed_size]
    wide = structs.zip64_values(header.extra)
    for index, size in enumerate(sizes):
        if size == U32 and wide:
            sizes[index] = wide.pop(0)
    if (header.crc, *sizes) != (record.crc, record.size, record.compressed_size):
        return "its local header holds other sizes or another CRC than the directory"
    return None
