"""The layout of the file on rank 0, and what rank 0 alone has of it."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from fastserial.checksums import crc32
from fastserial.distributed.state.tables import bytes_of
from fastserial.formats.extents import Data, DescriptorPatch, Extent, Literal, Trailer, clip
from fastserial.formats.zip.layout import ZipLayout, ZipPlan
from fastserial.memory.storages import Memory, storage_memory
from fastserial.overlap.snapshot import StoragePart
from fastserial.saving import torch_writer

__all__ = ["Entry", "LaidOut", "Nowhere", "Places"]


class Entry(NamedTuple):
    """A record of the file.

    Attributes:
        data: its bytes, None for a storage.
        source: of a storage, see `LaidOut`; None if it is empty.
    """

    name: str
    nbytes: int
    data: bytes | None
    source: int | None


class Nowhere:
    """Memory of a storage of which only the size is known."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def copy_to(self, address: int, start: int, length: int) -> None:
        raise ValueError("no rank holds this memory as a whole")


class LaidOut:
    """The file as rank 0 lays it out.

    Attributes:
        entries: what is in the file, in its order; first the pickle.
        rest: storages that are in no container the ranks look into. A source of -1 or below is
            one of them, `rest[-1 - source]`.
        archive: the name that torch puts before the records' names.
    """

    def __init__(
        self, archive: str, entries: list[Entry], rest: Sequence[torch.UntypedStorage]
    ) -> None:
        """Lay nothing out yet."""
        self.archive = archive
        self.entries = entries
        self.rest = rest

    @functools.cached_property
    def plan(self) -> ZipPlan:
        """The layout. The memory of its storages is nowhere; `records` says what they are."""
        layout = ZipLayout(self.archive, torch_writer.alignment(), torch_writer.checksums_wanted())
        for stored, entries in groupby(self.entries, lambda entry: entry.data is None):
            if stored:
                some = list(entries)
                memories = [Nowhere(entry.nbytes) for entry in some]
                layout.add_memories([entry.name for entry in some], memories)
                continue
            for entry in entries:
                data = entry.data or b""
                layout.add_bytes(entry.name, data, crc32(data))
        return torch_writer.finish(layout)

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [extent.offset for extent in self.plan.extents]

    @property
    def trailer(self) -> Extent | None:
        """What needs the checksums of all ranks, None if nothing does."""
        last = self.plan.extents[-1]
        return last if isinstance(last.source, Trailer) else None

    def memory(self, source: int) -> Memory:
        """Return the memory of a source that only rank 0 has."""
        return storage_memory(self.rest[-1 - source])

    def part(self, source: int, start: int, length: int) -> StoragePart:
        """Return bytes of a source that only rank 0 has as what a snapshot takes."""
        return StoragePart(self.rest[-1 - source], start, length)

    def source_bytes(self, source: int, start: int, length: int) -> torch.Tensor:
        """Return bytes of a source that only rank 0 has."""
        return bytes_of(self.rest[-1 - source])[start : start + length]

    def bytes_at(self, offset: int, length: int) -> torch.Tensor:
        """Return the zip's bytes at a place of the file, with 0 for checksums not known yet."""
        text = b"".join(
            memoryview(extent.source.data)[extent.start : extent.start + extent.length]
            for extent in self.extents_at(offset, length)
            if isinstance(extent.source, Literal | DescriptorPatch)
        )
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def extents_at(self, offset: int, length: int) -> Iterator[Extent]:
        """Return the extents that are the zip's bytes at a place of the file."""
        first = max(bisect_right(self._starts, offset) - 1, 0)
        stop = bisect_right(self._starts, offset + length)
        return clip(self.plan.extents[first:stop], offset, offset + length)

    @functools.cached_property
    def places(self) -> Places:
        """Where the records are."""
        extents = self.plan.extents
        data = (extent for extent in extents if isinstance(extent.source, Data))
        sources = (
            (index, entry.source)
            for index, entry in enumerate(self.entries)
            if entry.source is not None
        )
        records = [
            (*source, extent.offset, extent.length)
            for source, extent in zip(sources, data, strict=True)
        ]
        nbytes, trailer = self.plan.nbytes, self.trailer
        return Places(records, trailer.offset if trailer is not None else nbytes, nbytes)


class Places(NamedTuple):
    """Where everything is in the file.

    Attributes:
        records: those with data, in file order: number, source, place in the file, bytes.
        end: where what needs the checksums of all ranks begins, or the file ends.
        nbytes: size of the file.
    """

    records: list[tuple[int, int, int, int]]
    end: int
    nbytes: int
