"""The layout of the file, on rank 0."""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from fastserial.checksums import crc32
from fastserial.distributed.plan.schedule import FilePlan
from fastserial.formats.extents import Data, DescriptorPatch, Extent, Literal, Trailer, clip
from fastserial.formats.zip.layout import ZipLayout, ZipPlan
from fastserial.saving import torch_writer

__all__ = ["AbsentMemory", "ArchiveRecord", "FileLayout"]


class ArchiveRecord(NamedTuple):
    """A record of the file.

    Attributes:
        data: its bytes, None for a storage.
        source: number of a storage's source (`Table`); None if the storage is empty.
    """

    name: str
    nbytes: int
    data: bytes | None
    source: int | None


class AbsentMemory:
    """Memory of a storage of which only the size is known."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def copy_to(self, address: int, start: int, length: int) -> None:
        raise ValueError("no rank holds this memory as a whole")


class FileLayout:
    """The file as rank 0 lays it out: torch writes the records to it as to a PyTorchFileWriter.

    Attributes:
        records: what is in the file, in its order; first the pickle.
        rest: storages that are in no container the ranks look into. A source of -1 or below is
            one of them, `rest[-1 - source]`.
    """

    def __init__(
        self, archive: str, numbers: Mapping[int, int], of_storage: Mapping[int, int]
    ) -> None:
        """Lay nothing out yet.

        Args:
            archive: the name that torch puts before the records' names.
            numbers: of the sources, by the address of what is pickled for them.
            of_storage: of the sources, by the identity of their storage.
        """
        self.records: list[ArchiveRecord] = []
        self.rest: list[torch.UntypedStorage] = []
        self._archive = archive
        self._numbers, self._of_storage = numbers, of_storage

    def archive_name(self) -> str:
        return self._archive

    def write_record(self, name: str, data: Any, size: int) -> None:
        """Take a record of torch's; the bytes of a storage stay where they are."""
        if isinstance(data, str):
            data = data.encode()
        if isinstance(data, bytes | bytearray | memoryview):
            self.records.append(ArchiveRecord(name, size, bytes(data[:size]), None))
        else:
            source = self._source_of(data) if size else None
            self.records.append(ArchiveRecord(name, size, None, source))

    def _source_of(self, storage: torch.UntypedStorage) -> int:
        number = self._numbers.get(storage.data_ptr())
        if number is None:
            number = self._of_storage.get(storage._cdata)
        if number is None:
            self.rest.append(storage)
            number = -len(self.rest)
        return number

    @functools.cached_property
    def plan(self) -> ZipPlan:
        """The layout. The memory of its storages is nowhere; `records` says what they are."""
        layout = ZipLayout(self._archive, torch_writer.alignment(), torch_writer.checksums_wanted())
        for record in self.records:
            if record.data is None:
                layout.add_memory(record.name, AbsentMemory(record.nbytes), b"")
            else:
                layout.add_bytes(record.name, record.data, crc32(record.data))
        return torch_writer.finish(layout)

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [extent.offset for extent in self.plan.extents]

    @property
    def trailer(self) -> Extent | None:
        """What needs the checksums of all ranks, None if nothing does."""
        last = self.plan.extents[-1]
        return last if isinstance(last.source, Trailer) else None

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

    def file_plan(self, writers: list[int]) -> FilePlan:
        """Return what all ranks have to know of the file. What needs checksums is not in it."""
        data = (extent for extent in self.plan.extents if isinstance(extent.source, Data))
        sources = (
            (index, record.source)
            for index, record in enumerate(self.records)
            if record.source is not None
        )
        records = [
            (*source, extent.offset, extent.length)
            for source, extent in zip(sources, data, strict=True)
        ]
        end = self.trailer.offset if self.trailer is not None else self.plan.nbytes
        return FilePlan(end, records, writers, torch_writer.checksums_wanted())
