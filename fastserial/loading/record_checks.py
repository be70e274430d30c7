"""The checksums of records whose bytes arrive in pieces, in any order, on any threads."""

from __future__ import annotations

from collections.abc import Sequence

from fastserial.checksums import CrcLedger, check_crc, crc32
from fastserial.errors import CorruptCheckpointError
from fastserial.formats.zip.directory import RecordEntry
from fastserial.loading.sinks import CheckedSink, Sink

__all__ = ["RecordChecks"]


class RecordChecks:
    """Compares the bytes of records with the CRC-32 that the archive has of each."""

    def __init__(self, path: str, records: Sequence[RecordEntry]) -> None:
        self._path = path
        self._index = {record.name: index for index, record in enumerate(records)}
        self._ledger = CrcLedger([record.size for record in records], [None] * len(records))

    def see(self, record: RecordEntry, start: int, view: memoryview) -> None:
        """Look at the bytes of a record from byte `start` on."""
        self._ledger.add(self._index[record.name], start, len(view), crc32(view))

    def sink(self, record: RecordEntry, sink: Sink) -> CheckedSink:
        """Return a sink that looks at what it passes on."""
        return CheckedSink(sink, self._ledger, self._index[record.name])

    def give_up(self) -> None:
        """No more bytes come: nobody is to wait for them."""
        self._ledger.fail()

    def check(self, record: RecordEntry, has_header: bool) -> None:
        """Compare a record, once all of it was seen.

        Args:
            has_header: its local header is where it should be.

        Raises:
            CorruptCheckpointError: it is damaged.
        """
        path, name, offset = self._path, record.name, record.data_offset
        if not has_header:
            what = "its local header differs from the central directory"
            raise CorruptCheckpointError(what, path=path, record=name, offset=offset)
        if record.crc:  # 0: written without
            check_crc(self._ledger.wait(self._index[name]), record.crc, path, name, offset)
