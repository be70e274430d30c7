"""The structures of a zip file: signatures, formats, flags and limits, each once."""

from __future__ import annotations

import struct

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

LOCAL = struct.Struct("<4sHHHHHIIIHH")
LOCAL_LENGTHS = struct.Struct("<4s22xHH")  # of it: the signature, the lengths of name and extra
CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
DESCRIPTOR = struct.Struct("<4sIII")
DESCRIPTOR64 = struct.Struct("<4sIQQ")
END64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR = struct.Struct("<4sIQI")
END = struct.Struct("<4sHHHHIIH")
FIELD = struct.Struct("<HH")  # before each part of an extra field: its kind and its length
END_BYTES = END64.size + LOCATOR.size + END.size  # after the directory that torch writes

_ZIP64 = 1  # kinds of extra field
PADDING = int.from_bytes(b"FB", "little")
_MADE_BY = 0x031E
_NEEDED = 45


def descriptor_form(size: int, header_offset: int) -> struct.Struct:
    """Return the form of the data descriptor that torch writes behind a record (bytes)."""
    return DESCRIPTOR64 if size >= U32 or header_offset >= U32 else DESCRIPTOR


def descriptor(crc: int, compressed: int, size: int, header_offset: int) -> bytes:
    """Return the data descriptor that torch writes behind a record (sizes in bytes)."""
    form = descriptor_form(max(compressed, size), header_offset)
    return form.pack(DESCRIPTOR_SIGNATURE, crc, compressed, size)


def local_header(
    name: bytes,
    size: int,
    header_offset: int,
    padding: int,
    flags: int,
    method: int = STORED,
    needed: int = 0,
) -> bytes:
    """Return the local header that torch writes for a record, with name, zip64 field and padding.

    Its sizes and CRC are 0: torch writes them after the data.

    Args:
        name: with the archive name.
        size, header_offset: of the record (bytes).
        padding: bytes in the padding field.
        flags, method, needed: general purpose bits, compression, version needed.
    """
    extra = zip64_field(size, 0, header_offset) + padding_field(padding)
    lengths = len(name), len(extra)
    fields = LOCAL.pack(LOCAL_SIGNATURE, needed, flags, method, 0, 0, 0, 0, 0, *lengths)
    return fields + name + extra


def padding_field(nbytes: int) -> bytes:
    """Return the extra field of torch's that brings the data to its alignment."""
    return FIELD.pack(PADDING, nbytes) + b"Z" * nbytes


def zip64_field(size: int, compressed: int, header_offset: int) -> bytes:
    """Return the extra field that holds what does not fit 32 bits; nothing if all does."""
    values = (size, compressed) if size >= U32 else ()
    values = (*values, header_offset) if header_offset >= U32 else values
    if not values:
        return b""
    return struct.pack(f"<HH{len(values)}Q", _ZIP64, 8 * len(values), *values)


def zip64_values(extra: bytes) -> list[int]:
    """Return the 64-bit values of the zip64 part of an extra field, [] without one."""
    at = 0
    while at + FIELD.size <= len(extra):
        kind, length = FIELD.unpack_from(extra, at)
        at += FIELD.size
        if kind == _ZIP64:
            count = min(length, len(extra) - at) // 8
            return list(struct.unpack_from(f"<{count}Q", extra, at))
        at += length
    return []


def end_records(count: int, length: int, start: int) -> bytes:
    """Return what torch writes behind a directory of `count` records.

    Args:
        count: number of records.
        length, start: size and offset of the directory (bytes).
    """
    few = min(count, U16)
    counts = (0, 0, count, count, length, start)
    return b"".join(
        (
            END64.pack(END64_SIGNATURE, END64.size - 12, _MADE_BY, _NEEDED, *counts),
            LOCATOR.pack(LOCATOR_SIGNATURE, 0, start + length, 1),
            END.pack(END_SIGNATURE, 0, 0, few, few, min(length, U32), min(start, U32), 0),
        )
    )
