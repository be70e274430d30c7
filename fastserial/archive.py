"""ZipArchive: stands where torch's PyTorchFileWriter stands, and writes through a FastFileWriter.

torch's `_save` calls `write_record` for the pickle and the small records, as ever; then the patch
hands over all storages in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from fastserial import oracle
from fastserial.checksums import crc32
from fastserial.containers.batch import storage_batch
from fastserial.containers.extents import SMALL_BYTES, Memory
from fastserial.containers.zip import ZipLayout, check_alignment
from fastserial.foreign import SequentialWriter
from fastserial.staging import HostMemory, host_bytes, storage_memory, synchronize
from fastserial.writer import FastFileWriter

if TYPE_CHECKING:
    import torch

__all__ = ["ZipArchive"]

_HEAD = 8


class ZipArchive:
    """A context manager that lays out one archive and writes it when left without an exception."""

    def __init__(
        self,
        writer: FastFileWriter | SequentialWriter,
        archive: str,
        owns_writer: bool,
        alignment: int | None = None,
    ) -> None:
        """Start an archive at the writer's position.

        Args:
            writer: where the archive goes.
            archive: the name torch puts before the records' names.
            owns_writer: close the writer at the end, and discard it on an exception.
            alignment: of the records' data (bytes); by default the one torch would use.

        Raises:
            LayoutError: the storage alignment does not fit the format.
        """
        self._writer = writer
        self._owns_writer = owns_writer
        if alignment is None:
            alignment = oracle.alignment()
        check_alignment(alignment)
        self._alignment = alignment
        self._checksums = oracle.checksums_wanted()
        self._archive = archive
        # Records whose bytes are known, as long as there are no others and they are small.
        self._texts: list[tuple[str, bytes]] = []
        self._text_bytes = 0
        self._begun: ZipLayout | None = None
        self._finished = False
        writer.label("zip")

    @property
    def writer(self) -> FastFileWriter | SequentialWriter:
        """Where the archive goes."""
        return self._writer

    def archive_name(self) -> str:
        """Return the name put before the records' names."""
        return self._archive

    def write_record(
        self, name: str, data: str | bytes | int | torch.UntypedStorage, size: int
    ) -> None:
        """Add a record of `size` bytes: text, bytes, a storage, or host memory at an address."""
        if isinstance(data, str):
            data = data.encode()
        if isinstance(data, bytes):
            self._add_text(name, data[:size])
        elif isinstance(data, int):
            self._add_memory(name, HostMemory(data, size, None))
            self._writer.count_storages(1, size)
        else:
            self._add_memory(name, storage_memory(data))
            self._writer.count_storages(1, data.nbytes())

    @property
    def _layout(self) -> ZipLayout:
        """The layout, once there are records that are not small."""
        layout = self._begun
        if layout is None:
            layout = self._begun = ZipLayout(self._archive, self._alignment, self._checksums)
            for name, text in self._texts:
                layout.add_bytes(name, text, crc32(text))
            self._texts.clear()
        return layout

    def _add_text(self, name: str, text: bytes) -> None:
        self._text_bytes += len(text)
        if self._begun is None and self._text_bytes <= SMALL_BYTES:
            self._texts.append((name, text))
        else:
            self._layout.add_bytes(name, text, crc32(text))

    def write_record_metadata(self, name: str, size: int) -> None:
        """Add a record whose bytes are left out (`skip_data`)."""
        self._layout.add_hole(name, size)

    def add_storages(self, storages: Sequence[torch.UntypedStorage], names: Sequence[str]) -> None:
        """Add all storages at once, as records called `names`."""
        batch = storage_batch(storages)
        self._writer.count_storages(len(batch.sizes), sum(batch.sizes))
        copied = batch.copied()
        if copied is not None:
            for name, text in zip(names, copied, strict=True):
                self._add_text(name, text)
            return
        synchronize(storages)
        self._layout.add_storages(names, batch)

    def _add_memory(self, name: str, memory: Memory) -> None:
        head = host_bytes(memory, _HEAD) if memory.nbytes >= _HEAD else b""
        self._layout.add_memory(name, memory, head)

    def write_end_of_file(self) -> None:
        """Write the archive. Idempotent.

        Raises:
            WriteError: the disk is full or failed.
        """
        if self._finished:
            return
        self._finished = True
        if self._begun is not None:
            self._writer.write_plan(oracle.finish(self._begun))
        else:
            parts = (self._archive, self._alignment, self._checksums, self._texts)
            self._writer.write_small(oracle.small_archive(*parts))

    def __enter__(self) -> ZipArchive:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._writer.name_in(error)
            if self._owns_writer:
                self._writer.abort()
            return
        try:
            self.write_end_of_file()
            if self._owns_writer:
                self._writer.close()
            else:
                self._writer.settle()
        except BaseException:
            self._writer.abort()
            raise
