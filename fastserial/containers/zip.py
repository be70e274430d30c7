"""The zip container of `torch.save`: where every byte goes.

torch's C++ writer is the authority. `ZipLayout` repeats its arithmetic (stored records, `FB`
padding to the storage alignment, zip64 fields, data descriptors behind the data), and
`self_check` compares the result with the installed torch's own writer, zip64 included, before
fastserial is switched on. The one thing that cannot be computed here, the half of the
serialization id that hashes record names in the order of a C++ hash set, is asked from torch's
writer for each save (`names_hash`).

A data descriptor comes after its data, so the layout does not depend on checksums.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fastserial.containers.extents import Computed, Data, Extent, Hole, Literal, Memory, Sealed
from fastserial.errors import LayoutError

__all__ = ["ID_RECORD", "MAX_ALIGNMENT", "ZipLayout", "ZipPlan", "archive_name", "fold"]

ID_RECORD = ".data/serialization_id"
DESCRIPTOR_SIGNATURE = b"PK\x07\x08"
# The `FB` padding length and the extra field's length are 16-bit; zip64 takes up to 28 bytes.
MAX_ALIGNMENT = 65536 - 64

_U16 = 0xFFFF
_U32 = 0xFFFFFFFF
_U64 = 0xFFFFFFFFFFFFFFFF
_ID_DIGITS = 20
_CRC_AT = 4  # of a data descriptor
_UTF8, _HAS_DESCRIPTOR = 0x0800, 0x0008
_MADE_BY = 0x031E

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_DESCRIPTOR = struct.Struct("<4sIII")
_DESCRIPTOR64 = struct.Struct("<4sIQQ")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END = struct.Struct("<4sHHHHIIH")
_FB = struct.Struct("<2sH")


def archive_name(path: str) -> str:
    """Return the name torch puts before each record of a file saved to `path`."""
    if not path.isascii():
        # torch writes such a path through a Python file object, which has no name.
        return "archive"
    base = path[max(path.rfind("/"), path.rfind("\\")) + 1 :]
    dot = base.rfind(".")
    return base if dot < 0 else base[:dot]


def fold(seed: int, value: int) -> int:
    """Return torch's hash_combine of two 64-bit values."""
    return (seed ^ (value + 0x9E3779B9 + ((seed << 6) & _U64) + (seed >> 2))) & _U64


@dataclass(slots=True)
class _Record:
    """A laid-out record: full name, size and offset of its local header (bytes)."""

    name: bytes
    size: int
    header: int

    @property
    def is_zip64(self) -> bool:
        return self.size >= _U32 or self.header >= _U32


@dataclass(slots=True)
class ZipPlan:
    """A finished layout.

    Attributes:
        extents: the whole file in order.
        sizes: bytes of each record that has a CRC-32 to compute or known.
        crcs: the known CRC-32 of each record, None where it is computed while copying.
        nbytes: size of the file.
    """

    extents: list[Extent]
    sizes: list[int]
    crcs: list[int | None]
    nbytes: int


class ZipLayout:
    """Lays records out one after the other, as torch's writer does."""

    def __init__(self, archive: str, alignment: int, checksums: bool = True) -> None:
        """Start an empty archive.

        Args:
            archive: name put before each record's name (see `archive_name`).
            alignment: each record's data starts at a multiple of this many bytes.
            checksums: compute CRC-32s; False leaves them 0, as `set_crc32_options(False)` does.

        Raises:
            LayoutError: torch's own file would be broken with this alignment.
        """
        if not 0 < alignment <= MAX_ALIGNMENT:
            raise LayoutError(f"a storage alignment of {alignment} bytes does not fit a zip header")
        self.checksums = checksums
        self.names: list[str] = []
        self._prefix = archive.encode() + b"/"
        self._alignment = alignment
        self._records: list[_Record] = []
        self._crcs: list[int | None] = []
        # What goes into the id: (record, None) for its CRC, (record, value) for the quirk.
        self._folds: list[tuple[int, int | None]] = []
        self._extents: list[Extent] = []
        self._cursor = 0
        # Container bytes not yet in an extent, and the record whose CRC they begin with.
        self._bytes = bytearray()
        self._sealed_by: int | None = None

    def add_bytes(self, name: str, data: bytes, crc: int) -> None:
        """Add a record whose bytes and CRC-32 are known."""
        record = self._open(name, len(data), crc if self.checksums else 0)
        if data:
            self._append(data)
            self._close(record, data[:8])

    def add_memory(self, name: str, memory: Memory, head: bytes) -> None:
        """Add a storage; `head` holds its first 8 bytes, if it has as many."""
        nbytes = memory.nbytes
        record = self._open(name, nbytes, None if self.checksums and nbytes else 0)
        if nbytes:
            self._emit(Data(memory, nbytes, record if self.checksums else None))
            if self.checksums:
                self._sealed_by = record
            self._close(record, head)

    def add_hole(self, name: str, nbytes: int) -> None:
        """Add a record of `nbytes` bytes that are not written and have no CRC-32."""
        record = self._open(name, nbytes, 0)
        if nbytes:
            self._emit(Hole(nbytes))
            self._close(record, b"")

    def finish(self, names_hash: str, crc_of: Callable[[bytes], int]) -> ZipPlan:
        """Add the serialization id and the central directory, and return the plan.

        Args:
            names_hash: the 20 digits that torch derives from the names of the records.
            crc_of: CRC-32 of bytes.
        """
        folds = list(self._folds)
        checksums = self.checksums
        id_index = self._open(ID_RECORD, 2 * _ID_DIGITS, 0)
        self._flush()
        records = self._records
        entry = records[id_index]
        directory = self._cursor + entry.size + self._descriptor_size(entry)
        length = (
            directory
            - self._cursor
            + sum(
                _CENTRAL.size + len(record.name) + len(self._zip64_central(record))
                for record in records
            )
        )
        length += _END64.size + _END64_LOCATOR.size + _END.size

        def make(crcs: Sequence[int]) -> bytes:
            combined = 0
            for record, value in folds:
                combined = fold(combined, crcs[record] if value is None else value)
            text = f"{names_hash}{combined:0{_ID_DIGITS}d}".encode()
            id_crc = crc_of(text) if checksums else 0
            tail = text + self._descriptor(entry, id_crc)
            return tail + self._directory(directory, [*crcs[:id_index], id_crc])

        self._extents.append(Extent(self._cursor, length, Computed(length, make)))
        sizes = [record.size for record in records]
        return ZipPlan(self._extents, sizes, self._crcs, self._cursor + length)

    # -- building ------------------------------------------------------------------------------

    def _append(self, data: bytes) -> None:
        self._bytes += data
        self._cursor += len(data)

    def _flush(self) -> None:
        if self._bytes:
            data = bytes(self._bytes)
            sealed_by = self._sealed_by
            source = Literal(data) if sealed_by is None else Sealed(data, sealed_by, _CRC_AT)
            self._extents.append(Extent(self._cursor - len(data), len(data), source))
            self._bytes.clear()
            self._sealed_by = None

    def _emit(self, source: Data | Hole) -> None:
        self._flush()
        self._extents.append(Extent(self._cursor, source.length, source))
        self._cursor += source.length

    def _open(self, name: str, size: int, crc: int | None) -> int:
        """Append a record's local header; its data comes next. Returns the record's index."""
        record = _Record(self._prefix + name.encode(), size, self._cursor)
        zip64 = self._zip64_local(record)
        header = _LOCAL.size + len(record.name) + len(zip64) + _FB.size
        padding = -(self._cursor + header) % self._alignment
        extra = len(zip64) + _FB.size + padding
        flags = _UTF8 | _HAS_DESCRIPTOR if size else _UTF8
        local = _LOCAL.pack(
            b"PK\x03\x04", 0, flags, 0, 0, 0, 0, 0, 0, len(record.name), extra
        )  # fmt: skip
        self._append(
            b"".join((local, record.name, zip64, _FB.pack(b"FB", padding), b"Z" * padding))
        )
        self.names.append(name)
        self._records.append(record)
        self._crcs.append(crc)
        return len(self._records) - 1

    def _close(self, record: int, head: bytes) -> None:
        """Append the data descriptor, and note what torch folds into the id here."""
        if len(head) >= 8 and head[:4] == DESCRIPTOR_SIGNATURE:
            # torch takes any one write that begins like a descriptor for one.
            self._folds.append((record, int.from_bytes(head[4:8], "little")))
        self._folds.append((record, None))
        self._append(self._descriptor(self._records[record], self._crcs[record] or 0))

    def _descriptor_size(self, record: _Record) -> int:
        return _DESCRIPTOR64.size if record.is_zip64 else _DESCRIPTOR.size

    def _descriptor(self, record: _Record, crc: int) -> bytes:
        form = _DESCRIPTOR64 if record.is_zip64 else _DESCRIPTOR
        return form.pack(DESCRIPTOR_SIGNATURE, crc, record.size, record.size)

    def _zip64(self, *values: int) -> bytes:
        return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""

    def _zip64_local(self, record: _Record) -> bytes:
        # The compressed size is not known yet when torch writes the local header.
        sizes = (record.size, 0) if record.size >= _U32 else ()
        return self._zip64(*sizes, *((record.header,) if record.header >= _U32 else ()))

    def _zip64_central(self, record: _Record) -> bytes:
        sizes = (record.size, record.size) if record.size >= _U32 else ()
        return self._zip64(*sizes, *((record.header,) if record.header >= _U32 else ()))

    def _directory(self, start: int, crcs: Sequence[int]) -> bytes:
        """Return the central directory, which starts at byte `start`, and the end records."""
        parts: list[bytes] = []
        for record, crc in zip(self._records, crcs, strict=True):
            extra = self._zip64_central(record)
            size = min(record.size, _U32)
            flags = _UTF8 | _HAS_DESCRIPTOR if record.size else _UTF8
            parts += (
                _CENTRAL.pack(
                    b"PK\x01\x02", 0, 0, flags, 0, 0, 0, crc, size, size, len(record.name),
                    len(extra), 0, 0, 0, 0, min(record.header, _U32),
                ),
                record.name,
                extra,
            )  # fmt: skip
        directory = b"".join(parts)
        end, count, length = start + len(directory), len(self._records), len(directory)
        few = min(count, _U16)
        return b"".join(
            (
                directory,
                _END64.pack(b"PK\x06\x06", 44, _MADE_BY, 45, 0, 0, count, count, length, start),
                _END64_LOCATOR.pack(b"PK\x06\x07", 0, end, 1),
                _END.pack(b"PK\x05\x06", 0, 0, few, few, min(length, _U32), min(start, _U32), 0),
            )
        )
