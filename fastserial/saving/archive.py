"""ZipArchive replaces torch's PyTorchFileWriter and writes through a FastFileWriter.

torch's `_save` calls `write_record` for the pickle and the small records; then the patch passes all
storages in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastserial import trace
from fastserial.checksums import crc32
from fastserial.errors import name_in
from fastserial.formats.zip_layout import ZipLayout, ZipPlan
from fastserial.memory.held_settings import paused_collection
from fastserial.memory.storages import (
    Batch,
    HostMemory,
    Memory,
    host_bytes,
    storage_batch,
    storage_memory,
    synchronize,
)
from fastserial.saving import torch_writer

if TYPE_CHECKING:
    import torch

    from fastserial.saving.writer import FastFileWriter


_HEAD = 8


class ZipArchive:
    """A context manager that lays out one archive and writes it when left without an exception."""

    def __init__(
        self,
        writer: FastFileWriter | None,
        archive: str,
        owns_writer: bool = False,
        alignment: int | None = None,
    ) -> None:
        """Start an archive at the writer's position.

        Args:
            writer: the target of the archive; None: it is laid out, and not written.
            archive: the name torch puts before the records' names.
            owns_writer: close the writer at the end. An exception discards it in any case.
            alignment: of the records' data (bytes); by default the one torch would use.

        Raises:
            LayoutError: the storage alignment does not fit the format.
        """
        self._plan: ZipPlan | None = None  # the layout, once it is complete
        self._writer = writer
        self._owns_writer = owns_writer
        if alignment is None:
            alignment = torch_writer.alignment()
        self._layout = ZipLayout(archive, alignment, torch_writer.checksums_wanted())
        self._archive = archive
        self._pause = paused_collection()  # while torch pickles

    def archive_name(self) -> str:
        """Return the name put before the records' names."""
        return self._archive

    @trace.traced("layout")
    def write_record(
        self, name: str, data: str | bytes | int | torch.UntypedStorage, size: int
    ) -> None:
        """Add a record of `size` bytes: text, bytes, a storage, or host memory at an address."""
        if isinstance(data, str):
            data = data.encode()
        if isinstance(data, bytes):
            text = data[:size]
            self._layout.add_bytes(name, text, crc32(text))
        elif isinstance(data, int):
            self._add_memory(name, HostMemory(data, size, None))
        else:
            self._add_memory(name, storage_memory(data))

    @trace.traced("layout")
    def add_storages(self, storages: Sequence[torch.UntypedStorage], names: Sequence[str]) -> None:
        """Add all storages at once, as records called `names`."""
        self._pause.end()  # copies and waits may take long
        synchronize(storages)
        batch = self._batch(storages)
        with paused_collection():
            self._layout.add_storages(names, batch)

    def _batch(self, storages: Sequence[torch.UntypedStorage]) -> Batch:
        """Return the memory that the storages' bytes are read from."""
        return storage_batch(storages)

    def _add_memory(self, name: str, memory: Memory) -> None:
        head = host_bytes(memory, _HEAD) if memory.nbytes >= _HEAD else b""
        self._layout.add_memory(name, memory, head)

    def lay_out(self) -> ZipPlan:
        """Complete the layout, at the first call, and return it."""
        if self._plan is None:
            self._pause.end()
            with paused_collection():
                self._plan = torch_writer.finish(self._layout)
        return self._plan

    def write_end_of_file(self) -> None:
        """Write the archive. Idempotent.

        Raises:
            WriteError: the disk is full or failed.
        """
        first = self._plan is None
        plan = self.lay_out()
        if first and self._writer is not None:
            write = self._writer.write_whole if self._owns_writer else self._writer.write_plan
            write(plan)

    def __enter__(self) -> ZipArchive:
        self._pause.begin()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        writer = self._writer
        try:
            if error is None:
                self.write_end_of_file()
                if writer is not None and not self._owns_writer:
                    writer.release_sources()
            elif writer is not None:
                name_in(error, writer.name)
                writer.abort()
        except BaseException:
            if writer is not None:
                writer.abort()
            raise
        finally:
            self._pause.end()
