"""Extents: contiguous pieces of a file and where their bytes come from.

A layout is a sequence of extents in file order, without gaps. A source is one of:

- `Literal`: bytes known beforehand;
- `Data`: the memory of a storage; its CRC-32 may be wanted;
- `Sealed`: known bytes but for the CRC-32 of one record, to be put in at a place;
- `Computed`: bytes that need the CRC-32 of every record;
- `Hole`: nothing; reads back as zeros (`skip_data` leaves room for storages).

A `Sealed` or `Computed` extent comes after all the data it speaks of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "Computed",
    "Data",
    "Extent",
    "Hole",
    "Literal",
    "Memory",
    "Sealed",
    "Source",
    "total_length",
]


class Memory(Protocol):
    """Bytes of a storage, wherever they are."""

    nbytes: int

    def copy_to(self, address: int, start: int, length: int) -> None:
        """Copy `length` bytes from byte `start` of the storage to host memory at `address`."""


@dataclass(slots=True)
class Literal:
    """Bytes known when the layout is made."""

    data: bytes | memoryview

    @property
    def length(self) -> int:
        return len(self.data)


@dataclass(slots=True)
class Data:
    """A storage's bytes; `record` is the index its CRC-32 is kept under, None if not wanted."""

    memory: Memory
    length: int
    record: int | None


@dataclass(slots=True)
class Sealed:
    """Known bytes with the little-endian CRC-32 of `record` put in at byte `at`."""

    data: bytes
    record: int
    at: int

    @property
    def length(self) -> int:
        return len(self.data)


class Computed:
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


@dataclass(slots=True)
class Hole:
    """Unwritten bytes, which read as zeros."""

    length: int


Source = Literal | Data | Sealed | Computed | Hole


@dataclass(slots=True)
class Extent:
    """`length` bytes at `offset` (bytes from the container's first byte)."""

    offset: int
    length: int
    source: Source


def total_length(extents: Iterable[Extent]) -> int:
    """Return the bytes that extents in file order cover."""
    return sum(extent.length for extent in extents)
