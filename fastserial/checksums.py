"""CRC-32 at the speed of memory, and the ledger that collects it from many threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import cast

from isal.isal_zlib import crc32, crc32_combine

from fastserial.errors import EngineError

__all__ = ["CrcLedger", "crc32", "crc32_combine"]


class CrcLedger:
    """CRC-32s of the records of one file, handed in piece by piece in any order.

    A record's pieces are checksummed where they are copied, by whichever thread copies them, and
    combined when the last one is there. Safe for concurrent use.
    """

    def __init__(self, sizes: Sequence[int], known: Sequence[int | None]) -> None:
        """Start a ledger over records of `sizes` bytes; `known` CRCs are final already."""
        self._sizes = sizes
        self._crcs: list[int | None] = list(known)
        self._pieces: dict[int, list[tuple[int, int, int]]] = {}
        self._arrived: dict[int, int] = {}
        self._missing = self._crcs.count(None)
        self._changed = threading.Condition()
        self._failed = False
        self._cause: BaseException | None = None

    def add(self, record: int, start: int, length: int, crc: int) -> None:
        """Enter the CRC of bytes [start, start + length) of a record."""
        if length == self._sizes[record]:
            self._settle(record, crc)
            return
        with self._changed:
            pieces = self._pieces.setdefault(record, [])
            pieces.append((start, length, crc))
            self._arrived[record] = self._arrived.get(record, 0) + length
            if self._arrived[record] < self._sizes[record]:
                return
            del self._pieces[record]
        pieces.sort()
        total = 0
        for _, length, crc in pieces:
            total = crc32_combine(total, crc, length)
        self._settle(record, total)

    def add_many(self, first: int, crcs: Sequence[int]) -> None:
        """Enter the CRCs of whole records, from record `first` on."""
        with self._changed:
            self._crcs[first : first + len(crcs)] = crcs
            self._missing -= len(crcs)
            self._changed.notify_all()

    def _settle(self, record: int, crc: int) -> None:
        with self._changed:
            self._crcs[record] = crc
            self._missing -= 1
            self._changed.notify_all()

    def wait(self, record: int) -> int:
        """Return a record's CRC, waiting for pieces that other threads are copying."""
        crc = self._crcs[record]
        if crc is None:
            with self._changed:
                self._changed.wait_for(lambda: self._crcs[record] is not None or self._failed)
            crc = self._crcs[record]
            if crc is None:
                raise self._cause or EngineError("it failed in another thread")
        return crc

    def wait_all(self) -> Sequence[int]:
        """Return the CRCs of all records, waiting for them."""
        with self._changed:
            self._changed.wait_for(lambda: not self._missing or self._failed)
            if self._missing:
                raise self._cause or EngineError("it failed in another thread")
        return cast("list[int]", self._crcs)

    def fail(self, cause: BaseException | None = None) -> None:
        """Wake all who wait: the pieces they wait for will not come. They raise the cause."""
        with self._changed:
            self._failed = True
            self._cause = self._cause or cause
            self._changed.notify_all()
