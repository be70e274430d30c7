"""The container torch wrote before 1.6: pickles, then each storage behind its element count.

No checksums, no alignment. The pickles come from torch; the layout adds, for each storage in the
order of the sorted keys, an int64 element count (little-endian) and the raw bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from fastserial.containers.extents import Data, Extent, Literal, Memory

__all__ = ["storage_extents"]

_COUNT = struct.Struct("<q")


def storage_extents(
    storages: Iterable[tuple[Memory, int]], offset: int, save_size: bool
) -> list[Extent]:
    """Lay storages out one behind the other.

    Args:
        storages: memory and element size (bytes) of each.
        offset: where the first extent starts (bytes).
        save_size: put the element count before each storage.
    """
    extents: list[Extent] = []
    for memory, element_size in storages:
        if save_size:
            # As torch: bytes beyond the last whole element are written, but not counted.
            count = _COUNT.pack(memory.nbytes // element_size)
            extents.append(Extent(offset, _COUNT.size, Literal(count)))
            offset += _COUNT.size
        if memory.nbytes:
            extents.append(Extent(offset, memory.nbytes, Data(memory, memory.nbytes, None)))
            offset += memory.nbytes
    return extents
