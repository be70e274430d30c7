"""The container torch wrote before 1.6: pickles, then each storage behind its element count.

No checksums, no alignment. The pickles come from torch; the layout adds, for each storage in the
order of the sorted keys, an int64 element count (little-endian) and the raw bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from fastserial.containers.extents import (
    PACKED_BYTES,
    PACKED_STORAGE,
    Data,
    Extent,
    Literal,
    Memory,
    Packed,
)
from fastserial.staging import HostMemory

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
    sources: list[Literal | Data | Packed] = []
    pack: Packed | None = None
    for memory, element_size in storages:
        nbytes = memory.nbytes
        # As torch: bytes beyond the last whole element are written, but not counted.
        count = _COUNT.pack(nbytes // element_size) if save_size else b""
        is_small = 0 < nbytes <= PACKED_STORAGE and isinstance(memory, HostMemory)
        if is_small and pack is not None and pack.length < PACKED_BYTES:
            pack.gaps.append(count)
            pack.length += len(count)
        else:
            if count:
                sources.append(Literal(count))
            pack = Packed(0, None, [], [], [], []) if is_small else None
            if pack is not None:
                sources.append(pack)
        if pack is not None and isinstance(memory, HostMemory):
            pack.addresses.append(memory.address)
            pack.sizes.append(nbytes)
            pack.owners.append(memory.owner)
            pack.length += nbytes
        elif nbytes:
            sources.append(Data(memory, nbytes, None))
    extents: list[Extent] = []
    for source in sources:
        extents.append(Extent(offset, source.length, source))
        offset += source.length
    return extents
