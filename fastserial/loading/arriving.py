"""Records of a zip checkpoint that are read into storages, and whether they arrived undamaged.

The local header of a record is read, too: only it says where the data really begins.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from fastserial.checksums import CrcLedger, check_crc
from fastserial.config.performance import IN_PLACE
from fastserial.errors import CorruptCheckpointError
from fastserial.formats.zip.structs import LOCAL, LOCAL_LENGTHS, LOCAL_SIGNATURE
from fastserial.loading.sinks import BytesSink, CheckedSink, HostSink, ReadExtent, storage_sink
from fastserial.memory.storages import new_storage

if TYPE_CHECKING:
    import torch

    from fastserial.formats.zip.directory import RecordEntry
    from fastserial.loading.sinks import Sink
    from fastserial.memory.buffers import Ring

__all__ = ["Arriving", "DeviceRecord", "HostRecord", "RecordChecks"]

_ALIGNMENT = 64  # of torch's own memory (bytes)


class HostRecord:
    """A record in host memory, laid out as in the file: its header, then its data.

    Attributes:
        memory: address and length of all that it takes.
    """

    __slots__ = ("_head", "_spare", "memory", "record", "storage")

    def __init__(self, record: RecordEntry, alignment: int = 0) -> None:
        """Allocate its memory.

        Args:
            record: stored, not empty.
            alignment: of direct reads (bytes): a large record has the same offset in memory as in
                the file, modulo this, with space around it, so that whole blocks can be read there.
                0: there are no direct reads.

        Raises:
            RuntimeError: there is no memory.
        """
        self.record = record
        self._head = record.data_offset - record.header_offset
        large = record.size >= IN_PLACE and not record.data_offset % _ALIGNMENT
        self._spare = alignment if large else 0
        start = self._spare + self._head + -self._head % _ALIGNMENT
        nbytes = start + record.size + 2 * self._spare
        memory = new_storage(nbytes)
        self.memory = memory.data_ptr(), nbytes
        if self._spare:
            start += (record.data_offset - self.memory[0] - start) % alignment
        # a part: like what torch reads from a zip, it cannot be resized
        self.storage = cast("torch.UntypedStorage", memory[start : start + record.size])

    def reads(self, checks: RecordChecks, ring: Ring | None = None) -> list[ReadExtent]:
        """Return what to read; `ring`: the staging buffers of bytes for devices."""
        record, head = self.record, self._head
        length = head + record.size
        # without devices the prefetch keeps the storage until it is taken
        owner = None if ring is None else self.storage
        sink = HostSink(self.storage.data_ptr() - head, length, owner, self._spare)
        return [ReadExtent(record.header_offset, length, checks.sink(record, sink, -head))]

    def header(self) -> bytes:
        """Return what lies between the record's beginning and its data, once all has arrived."""
        return (ctypes.c_char * self._head).from_address(self.storage.data_ptr() - self._head).raw


class DeviceRecord:
    """A record whose data is read to a device."""

    __slots__ = ("_header", "record", "storage")

    def __init__(self, record: RecordEntry, storage: torch.UntypedStorage) -> None:
        """Put the data of a record into a storage of its size."""
        self.record = record
        self.storage = storage
        self._header = BytesSink(record.data_offset - record.header_offset)

    def reads(self, checks: RecordChecks, ring: Ring | None = None) -> list[ReadExtent]:
        """Return what to read, as `HostRecord.reads`."""
        record, header = self.record, self._header
        sink = checks.sink(record, storage_sink(self.storage, ring))
        return [
            ReadExtent(record.header_offset, len(header.data), header),
            ReadExtent(record.data_offset, record.size, sink),
        ]

    def header(self) -> bytes:
        """Return the bytes before the data, as `HostRecord.header`."""
        return bytes(self._header.data)


Arriving = HostRecord | DeviceRecord


class RecordChecks:
    """Checks that records arrived as the directory describes them, and with `verify` undamaged."""

    def __init__(self, path: str, records: Sequence[RecordEntry], verify: bool) -> None:
        """Check records of an archive.

        Args:
            path: its name, for errors.
            records: all that may be checked.
            verify: compare their bytes with the CRC-32 that the archive has of each.
        """
        self._path = path
        self._verify = verify
        checked = records if verify else ()
        self._index = {record.name: index for index, record in enumerate(checked)}
        self._ledger = CrcLedger([record.size for record in checked], [None] * len(checked))

    def sink(self, record: RecordEntry, sink: Sink, start: int = 0) -> Sink:
        """Return a sink that passes bytes on, and with `verify` checksums those of the record.

        Args:
            record: what the bytes are of.
            sink: where they go.
            start: where in the record's data they begin; negative: with what is before it.
        """
        if not self._verify:
            return sink
        return CheckedSink(sink, self._ledger, self._index[record.name], start)

    def give_up(self) -> None:
        """End all waiting: no more bytes will arrive."""
        self._ledger.fail()

    def accept(self, one: Arriving, nbytes: int) -> torch.UntypedStorage | None:
        """Return the storage of a record of `nbytes` bytes, all of which arrived.

        None: torch must read it itself: it has another size, or its local header is not where it
        should be.

        Raises:
            CorruptCheckpointError: it is damaged (`verify`).
        """
        record, is_valid = one.record, _is_header(one.header(), one.record)
        if self._verify:
            path, name, offset = self._path, record.name, record.data_offset
            if not is_valid:
                what = "its local header differs from the central directory"
                raise CorruptCheckpointError(what, path=path, record=name, offset=offset)
            if record.crc:  # 0: written without
                check_crc(self._ledger.wait(self._index[name]), record.crc, path, name, offset)
        return one.storage if is_valid and record.size == nbytes else None


def _is_header(data: bytes, record: RecordEntry) -> bool:
    """Return whether these bytes, from which on a record's data follows, are its local header."""
    if len(data) < LOCAL.size:
        return False
    signature, name_length, extra_length = LOCAL_LENGTHS.unpack_from(data, 0)
    stop = LOCAL.size + name_length
    return (
        signature == LOCAL_SIGNATURE
        and stop + extra_length == len(data)
        and data[LOCAL.size : stop] == record.full_name
    )
