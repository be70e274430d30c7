"""ZipArchive replaces torch's PyTorchFileWriter and writes through a FastFileWriter.

torch's `_save` calls `write_record` for the pickle and the small records; then the patch passes all
storages in one call. A small file's records are kept until the end, and torch's own writer writes
them (`saving.small`); otherwise they are laid out here, and torch's writer is called for what only
it can decide: the hash of the record names.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from fastserial.checksums import crc32
from fastserial.config.performance import COPIED_RECORD, SMALL_FILE, KiB
from fastserial.formats.zip_layout import ZipLayout, ZipPlan
from fastserial.interrupts import suppress
from fastserial.memory.held_settings import paused_collection
from fastserial.memory.storages import (
    Batch,
    HostMemory,
    Memory,
    all_on_host,
    host_bytes,
    storage_batch,
    storage_memory,
    synchronize,
)

if TYPE_CHECKING:
    from fastserial.saving.small import SmallRecord
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
            alignment = storage_alignment()
        self._archive = archive
        self._alignment = alignment
        self._checksums = checksums_wanted()
        self._pause = paused_collection()
        # Records of an archive that is small so far, and their bytes; None: it is laid out.
        most = writer.most_by_torch if writer is not None and owns_writer else 0
        self._records: list[SmallRecord] | None = [] if most else None
        self._room = most
        self._is_written = False  # by torch's writer

    def archive_name(self) -> str:
        """Return the name put before the records' names."""
        return self._archive

    def write_record(
        self, name: str, data: str | bytes | int | torch.UntypedStorage, size: int
    ) -> None:
        """Add a record of `size` bytes: text, bytes, a storage, or host memory at an address."""
        is_here = not isinstance(data, torch.UntypedStorage) or all_on_host([data])
        if self._keep([(name, data, size)], size, is_here):
            return
        if isinstance(data, str):
            data = data.encode()
        if isinstance(data, bytes):
            text = data[:size]
            self._layout.add_bytes(name, text, crc32(text))
        elif isinstance(data, int):
            self._add_memory(name, HostMemory(data, size, None))
        else:
            self._add_memory(name, storage_memory(data))

    def write_record_metadata(self, name: str, size: int) -> None:
        """Add a record whose `size` bytes are zeros without a checksum, to be written later."""
        if not self._keep([(name, None, size)], size, True):
            self._layout.add_bytes(name, bytes(size), 0)

    def add_storages(self, storages: Sequence[torch.UntypedStorage], names: Sequence[str]) -> None:
        """Add all storages at once, as records called `names`."""
        sizes = list(map(torch.UntypedStorage.nbytes, storages))
        nbytes = sum(sizes)
        is_here = all_on_host(storages)
        if self._keep(list(zip(names, storages, sizes, strict=True)), nbytes, is_here):
            return
        if nbytes > SMALL_FILE:
            self._pause.end()  # copies and waits may take long
        synchronize(storages)
        batch = self._batch(storages)
        self._pause.begin()
        few = nbytes + KiB * len(names) <= COPIED_RECORD and self._writer is not None
        if few and 0 not in batch.addresses:
            texts = batch.texts(0, len(names))  # then nothing is left to do at the end
            self._layout.add_all_bytes(names, texts, list(map(crc32, texts)))
        else:
            self._layout.add_storages(names, batch)

    @cached_property
    def _layout(self) -> ZipLayout:
        return ZipLayout(self._archive, self._alignment, self._checksums)

    def _keep(self, records: Sequence[SmallRecord], nbytes: int, is_here: bool) -> bool:
        """Keep records for torch's own writer; False: they are to be laid out, as those before.

        Args:
            nbytes: of them all.
            is_here: they are in host memory.
        """
        if self._records is None:
            return False
        self._room -= nbytes + KiB * len(records)
        if self._room >= 0 and is_here:
            self._records += records
            return True
        self._lay_out_kept()
        return False

    def _lay_out_kept(self) -> None:
        kept, self._records = self._records or [], None
        for name, data, size in kept:
            if data is None:
                self.write_record_metadata(name, size)
            else:
                self.write_record(name, data, size)

    def _batch(self, storages: Sequence[torch.UntypedStorage]) -> Batch:
        """Return the memory that the storages' bytes are read from."""
        return storage_batch(storages)

    def _add_memory(self, name: str, memory: Memory) -> None:
        head = host_bytes(memory, _HEAD) if memory.nbytes >= _HEAD else b""
        self._layout.add_memory(name, memory, head)

    def lay_out(self) -> ZipPlan:
        """Complete the layout, at the first call, and return it."""
        if self._plan is None:
            self._pause.begin()
            self._plan = finish_layout(self._layout)
        return self._plan

    def write_end_of_file(self) -> None:
        """Write the archive. Idempotent.

        Raises:
            WriteError: the disk is full or failed.
        """
        if self._records is not None and self._writer is not None:
            options = self._archive, self._alignment, self._checksums
            if self._writer.write_by_torch(*options, self._records):
                self._records, self._is_written = None, True
            else:
                self._lay_out_kept()
        if self._is_written:
            return
        first = self._plan is None
        plan = self.lay_out()
        if plan.nbytes > SMALL_FILE:
            self._pause.end()  # else a collection would take longer than what is left
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
                writer.fail(error)
        except BaseException as another:
            if writer is not None:
                writer.fail(another)
            raise
        finally:
            self._pause.end()


# -- torch's own writer --------------------------------------------------------------------------

_VERSION = b"3\n"
_DIGITS = 20
DEFAULT_ALIGNMENT = 64


def has_alignment() -> bool:
    """Return whether this torch can align storages (since 2.7)."""
    return hasattr(torch.serialization, "_get_storage_alignment")


def storage_alignment() -> int:
    """Return the storage alignment torch would use now, in bytes."""
    return (
        int(torch.serialization._get_storage_alignment()) if has_alignment() else DEFAULT_ALIGNMENT
    )


def checksums_wanted() -> bool:
    """Return whether torch would compute CRC-32s now (`set_crc32_options`)."""
    return bool(torch.serialization.get_crc32_options())


def new_writer(sink: Any, align: int, checksums: bool = True) -> Any:
    """Return torch's own writer of archives, which gives its bytes to `sink`, or writes a path."""
    more = (align,) if has_alignment() else ()
    return torch._C.PyTorchFileWriter(sink, checksums, *more)


def finish_layout(layout: ZipLayout) -> ZipPlan:
    """Add what torch's writer adds at the end of an archive, and return the plan."""
    digits = _names_hash(layout.names)
    layout.add_bytes("version", _VERSION, crc32(_VERSION))
    if "byteorder" not in layout.names:
        order = sys.byteorder.encode()
        layout.add_bytes("byteorder", order, crc32(order))
    return layout.finish(digits, crc32)


# The same state is saved again and again. By a digest of the names, which may take 60 MB.
_hashes: dict[bytes, str] = {}
_MOST_HASHES = 64


def _names_hash(names: Collection[str]) -> str:
    """Return the 20 digits of the serialization id that torch derives from the record names.

    torch's writer runs over empty records into the null device: their order in its hash set, and
    with it the digits, depends on the names alone.
    """
    text = "\0".join((str(len(names)), *names)).encode("utf-8", "surrogatepass")
    key = hashlib.blake2b(text).digest()
    if (known := _hashes.get(key)) is not None:
        return known
    writer = _discarding_writer()
    record = writer.write_record_metadata
    for name in names:
        record(name, 0)
    writer.write_end_of_file()
    found = str(writer.serialization_id())[:_DIGITS]
    if len(_hashes) >= _MOST_HASHES:
        _hashes.clear()
    _hashes[key] = found
    return found


def _discarding_writer() -> Any:
    with suppress(OSError, RuntimeError):  # no such device, or no descriptor free
        # torch would create a missing one as an ordinary file, which other programs would then fill
        if stat.S_ISCHR(os.stat(os.devnull).st_mode):
            return new_writer(os.devnull, DEFAULT_ALIGNMENT)
    return new_writer(PieceSink(), DEFAULT_ALIGNMENT)


class PieceSink:
    """Collects what torch's writer emits, joined; what it skips is a gap."""

    def __init__(self) -> None:
        self.position = 0
        self.pieces: list[tuple[int, bytearray]] = []

    def write(self, data: Any) -> int:
        text = bytes(data)
        last = self.pieces[-1] if self.pieces else None
        if last is not None and last[0] + len(last[1]) == self.position:
            last[1].extend(text)
        else:
            self.pieces.append((self.position, bytearray(text)))
        self.position += len(text)
        return len(text)

    def seek(self, offset: int, whence: int = 0) -> int:
        self.position = offset + (self.position if whence == 1 else 0)
        return self.position

    def flush(self) -> None:
        pass
