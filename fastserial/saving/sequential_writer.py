"""Somebody else's FastFileWriter as the target of a zip archive: DeepSpeed's, above all.

Its interface is sequential: `write(bytes)` and `save_torch_storage_object_list`. The container's
own bytes go the first way, in few large pieces; host storages go the second way, uncopied, where
torch would pass each as one `write`, which DeepSpeed's writer copies as a whole. The checksums are
ours: torch's take longer than the writing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from fastserial.checksums import CrcLedger, crc32
from fastserial.config.performance import SEQUENTIAL_CHUNK, SEQUENTIAL_GATHERED
from fastserial.formats.extents import Data
from fastserial.formats.zip.layout import ZipPlan
from fastserial.memory.storages import HostMemory, Memory, StorageOnHost
from fastserial.reports import SAVES
from fastserial.saving.fill import Part, staged

if TYPE_CHECKING:
    import torch

__all__ = ["SequentialWriter"]


class SequentialWriter:
    """Writes a zip plan through a foreign writer, which stays the caller's to close."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._parts: list[Part] = []
        self._gathered = 0

    @staticmethod
    def accepts(target: Any) -> bool:
        """Tell whether an object takes storages, and puts all of them into one file.

        A DeepSpeed writer that is one of several keeps only its share.
        """
        takes = callable(getattr(target, "save_torch_storage_object_list", None))
        alone = getattr(target, "_num_parallel_writers", 1) == 1
        return takes and alone and callable(getattr(target, "write", None))

    @property
    def name(self) -> str:
        """What errors call the file."""
        return str(getattr(self._target, "name", None) or repr(self._target))

    def write_plan(self, plan: ZipPlan) -> None:
        """Write a whole archive. It counts, but has no report: the file is the caller's."""
        began = perf_counter()
        ledger = CrcLedger(plan.sizes, plan.crcs)
        for extent in plan.extents:
            source = extent.source
            if isinstance(source, Data):
                self._flush()
                self._write_storage(source, ledger)
            else:
                self._parts.append(Part(extent.offset, source, extent.start, extent.length, ledger))
                self._gathered += source.length
                if self._gathered >= SEQUENTIAL_GATHERED:
                    self._flush()
        self._flush()
        SAVES.add(plan.nbytes, perf_counter() - began, None)

    def release_sources(self) -> None:
        """Do nothing: a foreign writer has copied what it was given."""

    def abort(self) -> None:
        """Do nothing: the file is the caller's."""

    def close(self) -> None:
        """Do nothing: the writer is the caller's."""

    def _flush(self) -> None:
        if self._parts:
            parts, self._parts, self._gathered = self._parts, [], 0
            self._target.write(staged(parts))

    def _write_storage(self, source: Data, ledger: CrcLedger) -> None:
        memory = source.memory
        if isinstance(memory, HostMemory):
            crc = self._write_host(memory)
        else:
            crc = self._in_chunks(memory, self._target.write)
        if source.record is not None:
            ledger.add(source.record, 0, source.length, crc)

    def _write_host(self, memory: HostMemory) -> int:
        import torch

        array = (ctypes.c_uint8 * memory.nbytes).from_address(memory.address)
        storage = torch.frombuffer(array, dtype=torch.uint8).untyped_storage()
        storages: list[tuple[torch.UntypedStorage, torch.dtype]] = [(storage, torch.uint8)]
        self._target.save_torch_storage_object_list(storages, False)
        if isinstance(memory, StorageOnHost):
            memory.check()
            if memory.shared:  # another thread may free it even now
                return self._in_chunks(memory, lambda part: None)
        return crc32(array)

    @staticmethod
    def _in_chunks(memory: Memory, use: Callable[[memoryview], object]) -> int:
        """Copy a memory piece by piece, pass the pieces on, and return the checksum of them all.

        Raises:
            StorageChangedError: the storage was resized.
        """
        crc = 0
        chunk = bytearray(min(SEQUENTIAL_CHUNK, memory.nbytes))
        address = ctypes.addressof(ctypes.c_char.from_buffer(chunk))
        for start in range(0, memory.nbytes, SEQUENTIAL_CHUNK):
            length = min(SEQUENTIAL_CHUNK, memory.nbytes - start)
            memory.copy_to(address, start, length)
            with memoryview(chunk)[:length] as part:
                use(part)
                crc = crc32(part, crc)
        return crc
