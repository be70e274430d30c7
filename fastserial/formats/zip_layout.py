"""The layout of the zip container of `torch.save`: the offset of every byte.

torch's C++ writer is the authority. `ZipLayout` repeats its arithmetic (stored records, `FB`
padding to the storage alignment, zip64 fields, data descriptors after the data), and
`self_check` compares the result with the installed torch's own writer, zip64 included, before
fastserial is switched on. The one thing that cannot be computed here, the half of the
serialization id that hashes record names in the order of a C++ hash set, comes from torch's
writer in each save (`names_hash`).

A data descriptor comes after its data, so the layout does not depend on checksums.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from typing import NamedTuple, cast

from fastserial.config.performance import COPIED_RECORD
from fastserial.errors import LayoutError
from fastserial.formats import zip_format
from fastserial.formats.extents import Data, DescriptorPatch, Extent, Literal, Packed, Trailer
from fastserial.formats.zip_format import (
    CENTRAL,
    DESCRIPTOR,
    END,
    END64,
    FIELD,
    LOCAL,
    LOCATOR,
    U32,
    UTF8,
)
from fastserial.memory.storages import Batch, Memory

ID_RECORD = ".data/serialization_id"
# The `FB` padding length and the extra field's length are 16-bit; zip64 takes up to 28 bytes.
MAX_ALIGNMENT = 65536 - 64

_END_BYTES = END64.size + LOCATOR.size + END.size  # after the directory
_PADDING = int.from_bytes(b"FB", "little")  # a kind of extra field
_MADE_BY = 0x031E
_NEEDED = 45
_U64 = 0xFFFFFFFFFFFFFFFF
_ID_DIGITS = 20
_LOOKALIKE_BYTES = 8  # a storage of fewer is not taken for a descriptor
_MARK = zip_format.DESCRIPTOR_SIGNATURE
_CRC_AT = 4  # in a data descriptor
_FLAGS = UTF8 | zip_format.HAS_DESCRIPTOR

_LENGTHS = struct.Struct("<HH")  # the end of a local header
_LOCAL_START = LOCAL.pack(zip_format.LOCAL_SIGNATURE, 0, _FLAGS, *[0] * 8)[: -_LENGTHS.size]
# The first 16 bytes of a central entry hold nothing but the flags; then come CRC-32, both sizes,
# the lengths of name and extra field, and the offset of the local header.
_CENTRAL_START, _CENTRAL_START_EMPTY = (
    CENTRAL.pack(zip_format.CENTRAL_SIGNATURE, 0, 0, flags, *[0] * 13)[:16]
    for flags in (_FLAGS, UTF8)
)
_CENTRAL = struct.Struct("<16sIIIHH10xI")
_LOCAL_BYTES = LOCAL.size + FIELD.size  # without name and padding


# -- the bytes between the data ------------------------------------------------------------------


def descriptor(crc: int, compressed: int, size: int, header_offset: int) -> bytes:
    """Return the data descriptor that torch writes behind a record (sizes in bytes)."""
    form = zip_format.descriptor_form(max(compressed, size), header_offset)
    return form.pack(_MARK, crc, compressed, size)


def local_header(
    name: bytes,
    size: int,
    header_offset: int,
    padding: int,
    flags: int,
    method: int = zip_format.STORED,
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
    fields = LOCAL.pack(zip_format.LOCAL_SIGNATURE, needed, flags, method, 0, 0, 0, 0, 0, *lengths)
    return fields + name + extra


def padding_field(nbytes: int) -> bytes:
    """Return the extra field of torch's that brings the data to its alignment."""
    return FIELD.pack(_PADDING, nbytes) + b"Z" * nbytes


def zip64_field(size: int, compressed: int, header_offset: int) -> bytes:
    """Return the extra field that holds what does not fit 32 bits; nothing if all does."""
    values = (size, compressed) if size >= U32 else ()
    values = (*values, header_offset) if header_offset >= U32 else values
    if not values:
        return b""
    return struct.pack(f"<HH{len(values)}Q", zip_format.ZIP64, 8 * len(values), *values)


def end_records(count: int, length: int, start: int) -> bytes:
    """Return what torch writes behind a directory of `count` records.

    Args:
        count: number of records.
        length, start: size and offset of the directory (bytes).
    """
    few = min(count, zip_format.U16)
    counts = (0, 0, count, count, length, start)
    near = min(length, U32), min(start, U32)
    wide = END64.pack(zip_format.END64_SIGNATURE, END64.size - 12, _MADE_BY, _NEEDED, *counts)
    locator = LOCATOR.pack(zip_format.LOCATOR_SIGNATURE, 0, start + length, 1)
    return wide + locator + END.pack(zip_format.END_SIGNATURE, 0, 0, few, few, *near, 0)


# -- the layout ----------------------------------------------------------------------------------


def archive_name(path: str) -> str:
    """Return the name torch puts before each record of a file saved to `path`."""
    if not path.isascii():
        # torch writes such a path through a Python file object, which has no name.
        return "archive"
    base = path[max(path.rfind("/"), path.rfind("\\")) + 1 :]
    dot = base.rfind(".")
    return base if dot < 0 else base[:dot]


def _check_alignment(alignment: int) -> None:
    """Refuse a storage alignment (bytes) with which torch's own file would be broken.

    Raises:
        LayoutError: it is one.
    """
    if not 0 < alignment <= MAX_ALIGNMENT:
        raise LayoutError(f"a storage alignment of {alignment} bytes does not fit a zip header")


def lookalike_of(head: bytes) -> int | None:
    """Return the bytes of a record's data that torch mistakes for a CRC-32, None without any.

    torch treats any write that begins like a data descriptor as one.

    Args:
        head: the first 8 bytes of the data.
    """
    if head[:4] == _MARK and len(head) >= _LOOKALIKE_BYTES:
        return int.from_bytes(head[4:8], "little")
    return None


def fold(seed: int, value: int) -> int:
    """Return torch's hash_combine of two 64-bit values."""
    return (seed ^ (value + 0x9E3779B9 + ((seed << 6) & _U64) + (seed >> 2))) & _U64


def _fold_all(values: Iterable[int]) -> int:
    """Return what `fold` makes of 0 and the values, one after the other."""
    seed = 0
    for value in values:
        seed = (seed ^ (value + 0x9E3779B9 + ((seed << 6) & _U64) + (seed >> 2))) & _U64
    return seed


class ZipPlan(NamedTuple):
    """A finished layout.

    Attributes:
        extents: the whole file in order.
        sizes: bytes of each record that has a CRC-32 to compute or known.
        crcs: the known CRC-32 of each record, None where it is computed while copying.
        nbytes: size of the file.
        lookalikes: the value that torch takes for a CRC-32, of each record whose data begins like a
            descriptor; more may be entered until the trailer is made (`lookalike_of`).
    """

    extents: list[Extent]
    sizes: list[int]
    crcs: list[int | None]
    nbytes: int
    lookalikes: dict[int, int]


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
        _check_alignment(alignment)
        self.checksums = checksums
        self.names: list[str] = []
        self._prefix = archive.encode() + b"/"
        self._alignment = alignment
        # Local headers without the name, before and after it, by its length and the padding.
        self._forms: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        # Per record: full name, size and offset of the local header (bytes), CRC-32 if known.
        self._full_names: list[bytes] = []
        self._sizes: list[int] = []
        self._headers: list[int] = []
        self._crcs: list[int | None] = []
        # Records whose data begins like a descriptor, and the value torch takes for its CRC.
        self._lookalikes: dict[int, int] = {}
        self._directory_bytes = 0
        self._extents: list[Extent] = []
        self._cursor = 0
        # Container bytes not yet in an extent, and the record whose CRC they begin with.
        self._bytes = bytearray()
        self._patched_by: int | None = None

    def add_bytes(self, name: str, data: bytes, crc: int) -> None:
        """Add a record whose bytes and CRC-32 are known."""
        self.add_all_bytes([name], [data], [crc])

    def add_all_bytes(
        self, names: Sequence[str], texts: Sequence[bytes], crcs: Sequence[int]
    ) -> None:
        """Add records whose bytes and CRC-32s are known."""
        record, start = len(self.names), self._cursor
        known = crcs if self.checksums else [0] * len(crcs)
        _, heads = self._open_all(names, list(map(len, texts)), known)
        self._cursor = start
        for index, (head, text) in enumerate(zip(heads, texts, strict=True), record):
            self._append(head)
            if len(text) > COPIED_RECORD:
                self._emit(Literal(text))
            else:
                self._append(text)
            if text:
                self._close(index, text[:8])

    def add_memory(self, name: str, memory: Memory, head: bytes, crc: int | None = None) -> None:
        """Add a storage.

        Args:
            name: of the record.
            memory: its bytes.
            head: the first 8 of them, if there are as many.
            crc: their CRC-32, None: it is computed while they are copied.
        """
        known = crc if self.checksums and memory.nbytes else 0
        self._open(name, memory.nbytes, known)
        if memory.nbytes:
            record = len(self.names) - 1
            self._put(memory, record)
            self._close(record, head)

    def add_storages(self, names: Sequence[str], batch: Batch) -> None:
        """Add storages as records called `names`; the batch's memory must stay valid."""
        record = len(self.names)
        known = [None if size and self.checksums else 0 for size in batch.sizes]
        headers, texts = self._open_all(names, batch.sizes, known)
        for index, head in batch.beginning_with(_MARK, _LOOKALIKE_BYTES).items():
            self._lookalikes[record + index] = int.from_bytes(head[4:8], "little")
        # Behind 4 GiB the descriptors are longer.
        far = bisect_left(headers, U32)
        after = self._cursor
        for first, stop, packed in batch.pieces():
            inside = (far,) if first < far < stop else ()
            for begin, end in pairwise((first, *inside, stop)):
                self._cursor = headers[begin]
                self._append(texts[begin])
                if packed:
                    limit = headers[end] if end < len(headers) else after
                    self._pack(record, begin, end, batch, texts, limit)
                elif batch.sizes[begin]:
                    self._put(batch.memory(begin), record + begin)
                    self._append(self._descriptor(record + begin, 0))

    def _open_all(
        self, names: Sequence[str], sizes: Sequence[int], crcs: Sequence[int | None]
    ) -> tuple[list[int], list[bytes]]:
        """Register records in a row; return offsets (bytes) and texts of their local headers.

        Moves the cursor past the last record's descriptor.
        """
        prefix, align, forms = self._prefix, self._alignment, self._forms
        full_names = [prefix + name.encode() for name in names]
        headers: list[int] = []
        texts: list[bytes] = []
        cursor = self._cursor
        for full_name, size in zip(full_names, sizes, strict=True):
            headers.append(cursor)
            length = len(full_name)
            before = cursor + _LOCAL_BYTES + length
            if 0 < size < U32 and cursor < U32:
                padding = -before % align
                form = forms.get((length, padding))
                if form is None:
                    filler = padding_field(padding)
                    form = (_LOCAL_START + _LENGTHS.pack(length, len(filler)), filler)
                    forms[length, padding] = form
                texts.append(form[0] + full_name + form[1])
                cursor = before + padding + size + DESCRIPTOR.size
            else:
                zip64 = len(zip64_field(size, 0, cursor))
                padding = -(before + zip64) % align
                flags = _FLAGS if size else UTF8
                texts.append(local_header(full_name, size, cursor, padding, flags))
                self._directory_bytes += zip64
                cursor = before + zip64 + padding + size
                if size:
                    cursor += zip_format.descriptor_form(size, headers[-1]).size
        self._cursor = cursor
        self.names += names
        self._full_names += full_names
        self._sizes += sizes
        self._headers += headers
        self._crcs += crcs
        self._directory_bytes += _CENTRAL.size * len(names) + sum(map(len, full_names))
        return headers, texts

    def _pack(
        self,
        record: int,
        begin: int,
        end: int,
        batch: Batch,
        texts: Sequence[bytes],
        limit: int,
    ) -> None:
        """Append the storages [begin, end) of a batch as one piece, up to byte `limit`."""
        self._flush()
        start, length = self._cursor, limit - self._cursor
        first = record + begin if self.checksums else None
        seal = zip_format.descriptor_form(0, self._headers[record + begin])
        sizes, gaps = batch.sizes[begin:end], [*texts[begin + 1 : end], b""]
        pack = Packed(length, first, sizes, gaps, seal, batch, begin)
        self._extents.append(Extent(start, length, pack))
        self._cursor = limit

    def finish(self, names_hash: str, crc_of: Callable[[bytes], int]) -> ZipPlan:
        """Add the serialization id and the central directory, and return the plan.

        Args:
            names_hash: the 20 digits that torch derives from the names of the records.
            crc_of: CRC-32 of bytes.
        """
        checksums = self.checksums
        self._open(ID_RECORD, 2 * _ID_DIGITS, 0)
        sizes, lookalikes = self._sizes, self._lookalikes
        last = len(sizes) - 1
        directory = self._cursor + sizes[last] + len(self._descriptor(last, 0))
        length = directory - self._cursor + self._directory_bytes
        length += _END_BYTES

        def make(crcs: Sequence[int]) -> bytes:
            values = [crc for crc, size in zip(crcs, sizes, strict=True) if size][:-1]
            if lookalikes:
                columns = enumerate(zip(crcs[:last], sizes, strict=False))
                pairs = (
                    (lookalikes[record], crc) if record in lookalikes else (crc,)
                    for record, (crc, size) in columns
                    if size
                )
                values = [value for pair in pairs for value in pair]
            combined = _fold_all(values)
            text = f"{names_hash}{combined:0{_ID_DIGITS}d}".encode()
            id_crc = crc_of(text) if checksums else 0
            tail = text + self._descriptor(last, id_crc)
            return tail + self._directory(directory, [*crcs[:last], id_crc])

        nbytes = self._cursor + length
        if None in self._crcs:
            self._flush()
            self._extents.append(Extent(self._cursor, length, Trailer(length, make)))
        else:
            self._append(make(cast("list[int]", self._crcs)))
            self._flush()
        # The trailer refers to this layout: with the list, the storages would be in a circle, and
        # stay in memory until a collection.
        extents, self._extents = self._extents, []
        return ZipPlan(extents, sizes, self._crcs, nbytes, lookalikes)

    # -- building ------------------------------------------------------------------------------

    def _append(self, data: bytes) -> None:
        self._bytes += data
        self._cursor += len(data)

    def _flush(self) -> None:
        """Turn the pending bytes into an extent."""
        if self._bytes:
            data = bytes(self._bytes)
            patched_by = self._patched_by
            source = (
                Literal(data) if patched_by is None else DescriptorPatch(data, patched_by, _CRC_AT)
            )
            self._extents.append(Extent(self._cursor - len(data), len(data), source))
            self._bytes.clear()
            self._patched_by = None

    def _emit(self, source: Data | Literal) -> None:
        self._flush()
        self._extents.append(Extent(self._cursor, source.length, source))
        self._cursor += source.length

    def _put(self, memory: Memory, record: int) -> None:
        """Append a storage; its CRC-32 is inserted into the descriptor that follows."""
        wanted = self._crcs[record] is None
        self._emit(Data(memory, memory.nbytes, record if wanted else None))
        if wanted:
            self._patched_by = record

    def _open(self, name: str, size: int, crc: int | None) -> None:
        """Append a record's local header; its data must follow."""
        headers, texts = self._open_all([name], [size], [crc])
        self._cursor = headers[0]
        self._append(texts[0])

    def _close(self, record: int, head: bytes) -> None:
        """Append a record's data descriptor, and note the lookalike."""
        lookalike = lookalike_of(head)
        if lookalike is not None:
            self._lookalikes[record] = lookalike
        self._append(self._descriptor(record, self._crcs[record] or 0))

    def _descriptor(self, record: int, crc: int) -> bytes:
        size = self._sizes[record]
        return descriptor(crc, size, size, self._headers[record])

    def _directory(self, start: int, crcs: Sequence[int]) -> bytes:
        """Return the central directory, which starts at byte `start`, and the end records."""
        sizes, headers, names = self._sizes, self._headers, self._full_names
        starts = [_CENTRAL_START if size else _CENTRAL_START_EMPTY for size in sizes]
        short = [min(size, U32) for size in sizes]
        near = [min(header, U32) for header in headers]
        extras = [
            b"" if size < U32 and header < U32 else zip64_field(size, size, header)
            for size, header in zip(sizes, headers, strict=True)
        ]
        lengths = (map(len, names), map(len, extras))
        entries = map(_CENTRAL.pack, starts, crcs, short, short, *lengths, near)
        directory = b"".join(chain.from_iterable(zip(entries, names, extras, strict=True)))
        return directory + end_records(len(self.names), len(directory), start)
