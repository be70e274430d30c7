"""The bytes between the data of two records: a data descriptor and a local header.

Together with the data (CRC-32) and the directory (see `ends`) they are every byte of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fastserial.checkpoints.verify.report import Problem
from fastserial.errors import CorruptCheckpointError
from fastserial.formats.zip import structs
from fastserial.formats.zip.directory import (
    LocalHeader,
    RecordEntry,
    parse_local_header,
)
from fastserial.formats.zip.structs import FIELD, HAS_DESCRIPTOR, LOCAL, U16, U32

__all__ = ["LONGEST_GAP", "check_gap"]

# A descriptor, a header, a name and an extra field of the greatest lengths.
LONGEST_GAP = structs.DESCRIPTOR64.size + LOCAL.size + 2 * U16


def check_gap(
    before: RecordEntry | None,
    after: RecordEntry | None,
    data: bytes,
    start: int,
    torch_made: bool,
    remark: Callable[[str], None],
) -> Iterator[Problem]:
    """Compare what lies between two records with what the directory says of them.

    Torch always writes the same, so any other byte is damage. What other programs write differs,
    and only what makes a difference to a reader is damage.

    Args:
        before: the record whose data ends where `data` starts.
        after: the record whose data starts where `data` ends.
        data: the bytes.
        start: their offset in the file.
        torch_made: hold it against what torch writes, byte for byte.
        remark: takes what is odd, but passed over by those who read the file.
    """
    if not torch_made:
        yield from _check_loosely(before, after, data, start, remark)
        return
    used = 0
    if before is not None and before.has_descriptor:
        used = _descriptor_length(before, data)
        if not used:
            yield _bad_descriptor(before, data, start)
            used = structs.descriptor_form(before.size, before.header_offset).size
    header = (after.header_offset - start) if after is not None else len(data)
    if header > used:
        name = f"after {before.name}" if before is not None else "at the beginning"
        yield Problem(
            "unaccounted",
            f"{header - used} bytes {name} belong to no record",
            offset=start + used,
        )
    if after is None:
        return
    found = data[header:]
    if found == _torch_header(after, len(found)):
        return
    problems = list(_header(after, found))
    if not problems:
        problems = [Problem("header", "its local header is damaged", after.name, start + header)]
    yield from problems


def _check_loosely(
    before: RecordEntry | None,
    after: RecordEntry | None,
    data: bytes,
    start: int,
    remark: Callable[[str], None],
) -> Iterator[Problem]:
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


def _torch_header(record: RecordEntry, length: int) -> bytes:
    """Return the local header of `length` bytes that torch writes for a record."""
    zip64 = structs.zip64_field(record.size, 0, record.header_offset)
    extra = length - LOCAL.size - len(record.full_name)
    padding = extra - len(zip64) - FIELD.size
    if padding < 0 or extra > U16:
        return b""
    kind = (record.stamp[1], record.flags, record.method)
    return b"".join(
        (
            LOCAL.pack(structs.LOCAL_SIGNATURE, *kind, 0, 0, 0, 0, 0, len(record.full_name), extra),
            record.full_name,
            zip64,
            structs.padding_field(padding),
        )
    )


def _descriptor_length(record: RecordEntry, data: bytes, room: int = 0) -> int:
    """Return the length of the descriptor that `data` starts with, 0 if it is not right.

    Of an empty record it may have several lengths: it is `room` bytes then, if it can be.
    """
    found = 0
    sizes = record.compressed_size, record.size
    for form in (
        (structs.DESCRIPTOR64,) if max(sizes) > U32 else (structs.DESCRIPTOR, structs.DESCRIPTOR64)
    ):
        signed = form.pack(structs.DESCRIPTOR_SIGNATURE, record.crc, *sizes)
        for expected in (signed, signed.removeprefix(structs.DESCRIPTOR_SIGNATURE)):
            if data.startswith(expected) and (not found or len(expected) == room):
                found = len(expected)
    return found


def _bad_descriptor(record: RecordEntry, data: bytes, start: int) -> Problem:
    form = structs.descriptor_form(record.size, record.header_offset)
    what = "is not there"
    if len(data) >= form.size and data[:4] == structs.DESCRIPTOR_SIGNATURE:
        _, crc, *sizes = form.unpack_from(data)
        what = f"holds sizes {sizes} instead of {record.size}"
        if crc != record.crc:
            what = f"holds CRC {crc:08x}, the directory {record.crc:08x}"
    return Problem("descriptor", f"its data descriptor {what}", record.name, start)


def _header(record: RecordEntry, data: bytes) -> Iterator[Problem]:
    at = record.header_offset

    def problem(message: str) -> Problem:
        return Problem("header", message, record.name, at)

    try:
        header = parse_local_header(data, record.name)
    except CorruptCheckpointError as error:
        yield problem(error.message)
        return
    if header.length != len(data):
        yield problem(f"its local header says that its data starts at byte {at + header.length}")
        return
    if header.name != record.full_name:
        yield problem("its local header has a different name")
    sizes = (header.crc, header.compressed_size, header.size)
    filled = (
        record.crc,
        min(record.compressed_size, U32),
        min(record.size, U32),
    )
    blank = bool(record.flags & HAS_DESCRIPTOR) or record.size == 0
    if sizes != filled and not (blank and sizes == (0, 0, 0)):
        yield problem("its local header holds other sizes or another CRC than the directory")
    _, needed, time, date = record.stamp[:4]
    expected = (record.flags, record.method, (needed, time, date))
    if (header.flags, header.method, header.stamp) != expected:
        yield problem("its local header holds other flags or times than the directory")
    yield from (problem(message) for message in _extra(record, header.extra))


def _extra(record: RecordEntry, extra: bytes) -> Iterator[str]:
    """Check the parts of an extra field that torch writes: zip64 values and padding."""
    wide = structs.zip64_values(extra)
    allowed: tuple[list[int], ...] = (
        [],
        [record.size, 0],
        [record.size, record.compressed_size],
        [record.header_offset],
        [record.size, 0, record.header_offset],
        [record.size, record.compressed_size, record.header_offset],
    )
    if wide not in allowed:
        yield "the 64-bit sizes in its local header differ from the directory"
    at = 0
    while at < len(extra):
        if at + FIELD.size > len(extra):
            yield "the extra field of its local header is damaged"
            return
        kind, length = FIELD.unpack_from(extra, at)
        at += FIELD.size + length
        if at > len(extra):
            yield "the extra field of its local header is damaged"
        elif kind == structs.PADDING and extra[at - length : at].strip(b"Z"):
            yield "the padding before its data is damaged"
