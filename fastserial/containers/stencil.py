"""Small archives that differ but in name and their records' bytes: laid out once, then filled in.

Training saves the same small states again and again, and to lay one out takes longer than to
write it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from fastserial.containers.extents import Literal
from fastserial.containers.zip import (
    CENTRAL_BYTES,
    CENTRAL_CRC_AT,
    CRC_AT,
    DESCRIPTOR_BYTES,
    END_BYTES,
    ID_DIGITS,
    ID_RECORD,
    LOCAL_NAME_AT,
    ZipLayout,
    fold_all,
    quirk_of,
)

__all__ = ["Stencil"]

_CRC = struct.Struct("<I")


class Stencil:
    """An archive far below 4 GiB whose records have names and sizes, but no bytes yet."""

    def __init__(
        self,
        archive_bytes: int,
        alignment: int,
        checksums: bool,
        names: Sequence[str],
        sizes: Sequence[int],
        names_hash: str,
    ) -> None:
        """Lay the archive out.

        Args:
            archive_bytes: length of the archive's name.
            alignment, checksums: as for `ZipLayout`.
            names: of the records, but for the serialization id.
            sizes: of the records (bytes).
            names_hash: as for `ZipLayout.finish`.

        Raises:
            LayoutError: torch's own file would be broken with this alignment.
        """
        self._checksums = checksums
        self._names_hash = names_hash
        archive = "a" * archive_bytes
        layout = ZipLayout(archive, alignment, checksums)
        self._archive_bytes = archive_bytes
        self._archive_at: list[int] = []
        # Where each record's data begins and ends, and where the directory repeats its CRC-32.
        self._spans: list[tuple[int, int]] = []
        for name, size in zip(names, sizes, strict=True):
            self._archive_at.append(layout.position + LOCAL_NAME_AT)
            layout.add_bytes(name, bytes(size), 0)
            end = layout.position - DESCRIPTOR_BYTES
            self._spans.append((end - size, end))
        self._archive_at.append(layout.position + LOCAL_NAME_AT)
        plan = layout.finish(names_hash, lambda _: 0)
        literals = [extent.source for extent in plan.extents if isinstance(extent.source, Literal)]
        self._image = b"".join([literal.data for literal in literals])
        lengths = [len(f"{archive}/{name}".encode()) for name in (*names, ID_RECORD)]
        at = plan.nbytes - END_BYTES - sum(lengths) - CENTRAL_BYTES * len(lengths)
        self._id_at = at - DESCRIPTOR_BYTES - 2 * ID_DIGITS
        self._listed: list[int] = []
        for length in lengths:
            self._archive_at.append(at + CENTRAL_BYTES)
            self._listed.append(at + CENTRAL_CRC_AT)
            at += CENTRAL_BYTES + length

    def filled(
        self, archive: bytes, texts: Sequence[bytes], crc_of: Callable[[bytes], int]
    ) -> bytearray:
        """Return the archive with its name and the records' bytes in it."""
        image = bytearray(self._image)
        length = self._archive_bytes
        for at in self._archive_at:
            image[at : at + length] = archive
        put, checksums = _CRC.pack_into, self._checksums
        values: list[int] = []
        for text, (start, stop), listed in zip(texts, self._spans, self._listed, strict=False):
            if not text:
                continue
            image[start:stop] = text
            quirk = quirk_of(text[:8])
            if quirk is not None:
                values.append(quirk)
            crc = 0
            if checksums:
                crc = crc_of(text)
                put(image, stop + CRC_AT, crc)
                put(image, listed, crc)
            values.append(crc)
        digits = f"{self._names_hash}{fold_all(values):0{ID_DIGITS}d}".encode()
        stop = self._id_at + len(digits)
        image[self._id_at : stop] = digits
        if checksums:
            crc = crc_of(digits)
            put(image, stop + CRC_AT, crc)
            put(image, self._listed[-1], crc)
        return image
