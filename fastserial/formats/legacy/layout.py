"""The container torch wrote before 1.6: pickles, then each storage after its element count.

No checksums, no alignment. The pickles come from torch; the layout adds, for each storage in the
order of the sorted keys, an int64 element count (little-endian) and the raw bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from operator import floordiv

from fastserial.formats.extents import Data, Extent, Literal, Packed
from fastserial.memory.storages import Batch

COUNT = struct.Struct("<q")  # of elements, before each storage


def element_counts(
    sizes: Sequence[int], element_sizes: Sequence[int], save_size: bool
) -> list[bytes]:
    """Return the bytes before each storage: its element count, or nothing without `save_size`."""
    if not save_size:
        return [b""] * len(sizes)
    # As torch: bytes beyond the last whole element are written, but not counted.
    return list(map(COUNT.pack, map(floordiv, sizes, element_sizes)))


def storage_extents(batch: Batch, counts: Sequence[bytes]) -> list[Extent]:
    """Lay storages out back to back.

    Args:
        batch: the storages.
        counts: the bytes before each, from `element_counts`.
    """
    sizes = batch.sizes
    sources: list[Literal | Data | Packed] = []
    for first, stop, packed in batch.pieces():
        if counts[first]:
            sources.append(Literal(counts[first]))
        if packed:
            part = sizes[first:stop]
            gaps = [*counts[first + 1 : stop], b""]
            length = sum(part) + sum(map(len, gaps))
            sources.append(Packed(length, None, part, gaps, None, batch, first))
        elif sizes[first]:
            sources.append(Data(batch.memory(first), sizes[first], None))
    extents: list[Extent] = []
    offset = 0
    for source in sources:
        extents.append(Extent(offset, source.length, source))
        offset += source.length
    return extents
