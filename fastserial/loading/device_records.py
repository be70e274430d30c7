"""The storages of a zip checkpoint, read to the device where `map_location` puts all of them.

No storage comes to the host as a whole. torch finds each on its device already, and has nothing to
move.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from fastserial.checksums import CrcLedger
from fastserial.errors import CorruptCheckpointError
from fastserial.loading.sinks import BytesSink, CheckedSink, ReadExtent, Sink, storage_sink
from fastserial.loading.units import is_header
from fastserial.memory import devices

if TYPE_CHECKING:
    from fastserial.formats.zip.directory import RecordEntry
    from fastserial.loading.reader import FastFileReader

__all__ = ["DeviceRecords", "device_of"]

_BYTE_ORDER = "byteorder"


def device_of(map_location: Any, stock: Any) -> torch.device | None:
    """Return the device that all storages go to as they are, None if that is not so, or not known.

    Args:
        map_location: of `torch.load`.
        stock: torch's reader of the file.
    """
    if not isinstance(map_location, str | torch.device):
        return None
    try:
        device = torch.device(map_location)
    except RuntimeError:  # torch will say so
        return None
    if not devices.has_streams(device) or not _only_torchs_own():
        return None
    module: Any = getattr(torch, device.type)
    if not module.is_available():
        return None
    if not stock.has_record(_BYTE_ORDER) or stock.get_record(_BYTE_ORDER) != sys.byteorder.encode():
        return None  # torch may have to swap bytes, on the host
    index = module.current_device() if device.index is None else device.index
    return torch.device(device.type, index) if index < module.device_count() else None


def _only_torchs_own() -> bool:
    """Return whether nobody registered another way to bring storages to devices."""
    serialization: Any = torch.serialization
    return all(
        getattr(restore, "func", restore).__module__ == serialization.__name__
        for _, _, restore in serialization._package_registry
    )


class DeviceRecords:
    """Records read to storages on a device. To torch's unpickler it is what `Prefetch` is."""

    def __init__(
        self,
        file: FastFileReader,
        records: Sequence[RecordEntry],
        device: torch.device,
        verify: bool,
    ) -> None:
        """Read stored, not empty records.

        Args:
            file: where from.
            records: what; their `data_offset` may be wrong (see `take`).
            device: where to.
            verify: check each record's CRC-32.

        Raises:
            RuntimeError: the device has not enough memory.
            CorruptCheckpointError: the file is damaged, or changed while it was read.
            OSError: it cannot be read.
        """
        self.wait_seconds = 0.0
        self._path = file.name
        self._verify = verify
        self._index = {record.name: index for index, record in enumerate(records)}
        self._ends = {record.name: record.data_end for record in records}
        self._ledger = CrcLedger([record.size for record in records], [None] * len(records))
        self._found: dict[str, tuple[RecordEntry, torch.UntypedStorage, BytesSink]] = {}
        make: Any = torch.UntypedStorage
        for record in records:
            storage = cast("torch.UntypedStorage", make(record.size, device=device))
            head = BytesSink(record.data_offset - record.header_offset)
            self._found[record.name] = record, storage, head
        file.attend([storage for _, storage, _ in self._found.values()])
        extents: list[ReadExtent] = []
        for record, storage, head in self._found.values():
            sink: Sink = storage_sink(storage, file.ring)
            if verify:
                sink = CheckedSink(sink, self._ledger, self._index[record.name])
            extents.append(ReadExtent(record.header_offset, len(head.data), head))
            extents.append(ReadExtent(record.data_offset, record.size, sink))
        file.read_into(extents)

    def take(self, name: str, nbytes: int) -> torch.UntypedStorage | None:
        """Return a record of `nbytes` bytes, once: the caller owns it then.

        None: torch must read this record itself (not one of ours, asked for before, of another
        size, or its local header is not where it should be).

        Raises:
            CorruptCheckpointError: the record is damaged (`verify`).
        """
        if name not in self._found:
            return None
        record, storage, head = self._found.pop(name)
        placed = is_header(memoryview(head.data), record)
        if self._verify:
            self._check(record, placed)
        return storage if placed and record.size == nbytes else None

    def _check(self, record: RecordEntry, placed: bool) -> None:
        what = None
        if not placed:
            what = "its local header differs from the central directory"
        elif record.crc:  # 0: written without
            crc = self._ledger.wait(self._index[record.name])
            if crc != record.crc:
                what = f"its CRC-32 is {crc:#010x}, not {record.crc:#010x}"
        if what is not None:
            raise CorruptCheckpointError(
                what, path=self._path, record=record.name, offset=record.data_offset
            )

    def end_of(self, name: str) -> int:
        """Return the offset of the first byte after a record's data."""
        return self._ends[name]

    @property
    def error(self) -> None:
        """Nothing: what goes wrong does so in the constructor."""
        return None

    def close(self) -> None:
        """Let go of what was not taken. Idempotent."""
        self._found.clear()
