"""The zip's own bytes, and what rank 0 alone has: what the other ranks cannot know."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import torch

from fastserial.distributed.onefile.laid_out import LaidOut
from fastserial.distributed.state.tables import bytes_of
from fastserial.formats.extents import DescriptorPatch, Extent, Literal, Trailer, clip
from fastserial.memory.storages import Memory, storage_memory
from fastserial.overlap.snapshot import Part

__all__ = ["Container"]


class Container:
    """Rank 0's part of the file."""

    def __init__(self, laid_out: LaidOut) -> None:
        self._extents = laid_out.plan.extents
        self._starts = laid_out.starts
        self._rest = laid_out.rest
        trailer = self._extents[-1]
        self.trailer = trailer if isinstance(trailer.source, Trailer) else None

    def memory(self, source: int) -> Memory:
        """Return the memory of a source that only rank 0 has."""
        return storage_memory(self._rest[-1 - source])

    def part(self, source: int, start: int, length: int) -> Part:
        """Return bytes of a source that only rank 0 has as what a snapshot takes."""
        return Part(self._rest[-1 - source], start, length)

    def bytes_at(self, offset: int, length: int) -> torch.Tensor:
        """Return the zip's bytes at a place of the file, with 0 for checksums not known yet."""
        text = b"".join(
            memoryview(extent.source.data)[extent.start : extent.start + extent.length]
            for extent in self.extents_at(offset, length)
            if isinstance(extent.source, Literal | DescriptorPatch)
        )
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def source_bytes(self, source: int, start: int, length: int) -> torch.Tensor:
        """Return bytes of a source that only rank 0 has."""
        return bytes_of(self._rest[-1 - source])[start : start + length]

    def extents_at(self, offset: int, length: int) -> Iterator[Extent]:
        """Return the extents that are the zip's bytes at a place of the file."""
        first = max(bisect_right(self._starts, offset) - 1, 0)
        stop = bisect_right(self._starts, offset + length)
        return clip(self._extents[first:stop], offset, offset + length)
