"""Extents: contiguous parts of a file, and the sources of their bytes.

A layout is a sequence of extents in file order, without gaps. It is a value: any thread or process
that has the sources may write any part of it, in any order (`clip`). A source is one of:

- `Literal`: bytes known beforehand;
- `Data`: the memory of a storage; its CRC-32 may be wanted;
- `Packed`: small host storages with the container's bytes between them, as one source;
- `DescriptorPatch`: known bytes except for the CRC-32 of one record, which is inserted later;
- `Trailer`: bytes that need the CRC-32 of every record;
- `Made`: bytes made when they are written, by a function that may wait for checksums.

A `DescriptorPatch`, `Trailer` or `Made` extent is *late*: it is filled when the checksums it needs
are known. In a layout it comes after all that data.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import floordiv
from typing import NamedTuple

from fastserial.interrupts import Locked
from fastserial.memory.storages import Batch, Memory


class Literal(NamedTuple):
    """Bytes known when the layout is made."""

    data: bytes | memoryview

    @property
    def length(self) -> int:
        return len(self.data)


class Data(NamedTuple):
    """A storage's bytes; `record` is the index its CRC-32 is kept under, None if not wanted."""

    memory: Memory
    length: int
    record: int | None


class DescriptorPatch(NamedTuple):
    """Known bytes with the little-endian CRC-32 of `record` inserted at byte `at`."""

    data: bytes
    record: int
    at: int

    @property
    def length(self) -> int:
        return len(self.data)


class WholeBytes:
    """Bytes that are made as a whole, and kept while blocks take pieces of them.

    Not shared: a save in a signal handler or a forked child must not wait for an interrupted one.
    """

    __slots__ = ("_lock", "_made", "_used")

    def __init__(self) -> None:
        self._made: bytes | None = None
        self._used = 0
        self._lock = threading.Lock()

    def piece(self, make: Callable[[], bytes], total: int, start: int, length: int) -> bytes:
        """Return `length` bytes from byte `start` on; each of the `total` bytes once.

        Args:
            make: returns all of them; called once, on any thread.
        """
        if length == total:
            return make()
        with Locked(self._lock):
            if self._made is None:
                self._made = make()
            piece = self._made[start : start + length]
            self._used += length
            if self._used == total:
                self._made = None
        return piece


@dataclass(slots=True)
class Packed:
    """Consecutive small host storages as one source: few objects for many tensors.

    Storage i is followed by its data descriptor, if there is a `seal` to pack it, and `gaps[i]`. If
    `first` is not None, it is the index of the first storage's record, and the CRC-32s of all are
    wanted. `batch` keeps the memory valid; the storages are those of it from `begin` on.
    """

    length: int
    first: int | None
    sizes: Sequence[int]
    gaps: Sequence[bytes]
    seal: struct.Struct | None
    batch: Batch
    begin: int
    whole: WholeBytes = field(default_factory=WholeBytes)


class Trailer:
    """Bytes made from all CRC-32s, once."""

    __slots__ = ("_made", "length", "make")

    def __init__(self, length: int, make: Callable[[Sequence[int]], bytes]) -> None:
        self.length = length
        self.make = make
        self._made: bytes | None = None

    def data(self, crcs: Sequence[int]) -> bytes:
        """Return the bytes, made at the first call."""
        if self._made is None:
            self._made = self.make(crcs)
        return self._made


class Made:
    """Bytes that `make` returns when they are written; called once, on any thread."""

    __slots__ = ("_whole", "length", "make")

    def __init__(self, length: int, make: Callable[[], bytes]) -> None:
        self.length = length
        self.make = make
        self._whole = WholeBytes()

    def piece(self, start: int, length: int) -> bytes:
        """Return `length` bytes from byte `start` on; each byte once."""
        return self._whole.piece(self.make, self.length, start, length)


ExtentSource = Literal | Data | Packed | DescriptorPatch | Trailer | Made


class Extent(NamedTuple):
    """`length` bytes at `offset`, from byte `start` of the source on.

    Offsets count from the container's first byte (bytes).
    """

    offset: int
    length: int
    source: ExtentSource
    start: int = 0


def renewed(extents: Iterable[Extent]) -> list[Extent]:
    """Return extents to be written once more: nothing is kept of what they gave before."""
    made: dict[int, ExtentSource] = {}

    def source_of(source: ExtentSource) -> ExtentSource:
        if isinstance(source, Packed):
            return replace(source, whole=WholeBytes())
        if isinstance(source, Trailer):
            return Trailer(source.length, source.make)
        return Made(source.length, source.make) if isinstance(source, Made) else source

    found = []
    for extent in extents:
        key = id(extent.source)
        if key not in made:
            made[key] = source_of(extent.source)
        found.append(extent._replace(source=made[key]))
    return found


def clip(extents: Iterable[Extent], first: int, stop: int) -> Iterator[Extent]:
    """Yield the extents in the byte range [first, stop), cut at its ends."""
    for extent in extents:
        begin = max(first, extent.offset)
        end = min(stop, extent.offset + extent.length)
        if begin < end:
            skipped = begin - extent.offset
            yield Extent(begin, end - begin, extent.source, extent.start + skipped)


# -- storages back to back: the legacy container, and safetensors --------------------------------

COUNT = struct.Struct("<q")  # of elements, before each storage of the legacy container


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
