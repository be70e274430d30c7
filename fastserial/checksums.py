"""CRC-32 at the speed of memory, the ledger that collects it from many threads, and the comparison.

A file is damaged if its bytes have another CRC-32 than the stored one. `crc_mismatch` is the only
comparison, for all sources of bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

from isal.isal_zlib import crc32, crc32_combine

from fastserial.errors import CorruptCheckpointError, TransferAbandonedError
from fastserial.interrupts import Locked

__all__ = [
    "CrcLedger", "PartialCrc", "check_crc", "crc32", "crc32_combine", "crc_mismatch", "joined_crc",
]  # fmt: skip


def crc_mismatch(found: int | None, stored: int) -> str | None:
    """Return what is wrong with bytes whose CRC-32 is not the stored one; None: nothing is.

    Example:
        `crc_mismatch(1, 2)` is `"its CRC-32 is 0x00000001, not 0x00000002"`.

    Args:
        found: the CRC-32 of the bytes, None if there is none: they could not be read whole.
        stored: the one that the file has of them.
    """
    if found == stored:
        return None
    if found is None:
        return "it cannot be read whole"
    return f"its CRC-32 is {found:#010x}, not {stored:#010x}"


def check_crc(
    found: int,
    stored: int,
    path: str | None = None,
    record: str | None = None,
    offset: int | None = None,
) -> None:
    """Raise if bytes have another CRC-32 than the stored one.

    Args:
        found, stored: as `crc_mismatch`.
        path, record, offset: where they are, for the error.

    Raises:
        CorruptCheckpointError: they have.
    """
    what = crc_mismatch(found, stored)
    if what is not None:
        raise CorruptCheckpointError(what, path=path, record=record, offset=offset)


class PartialCrc(NamedTuple):
    """The CRC-32 of bytes [start, start + length) of a record."""

    record: int
    start: int
    length: int
    crc: int


def joined_crc(pieces: Iterable[PartialCrc]) -> tuple[int, int]:
    """Return the CRC-32 of a record's first bytes, and how many bytes those are.

    They end where no piece goes on. Of pieces that overlap one is taken.
    """
    crc = at = 0
    for piece in sorted(pieces, key=lambda one: (one.start, -one.length)):
        if piece.start == at:
            crc, at = crc32_combine(crc, piece.crc, piece.length), at + piece.length
    return crc, at


class CrcLedger:
    """CRC-32s of the records of one file, added piece by piece in any order.

    A record's pieces are checksummed where they are copied, by whichever thread or process copies
    them, and combined when the last one is there. Safe for concurrent use.
    """

    def __init__(self, sizes: Sequence[int], known: Sequence[int | None]) -> None:
        """Start a ledger over records of `sizes` bytes; `known` CRCs are final already."""
        self._sizes = sizes
        self._crcs: list[int | None] = list(known)
        self._pieces: dict[int, list[PartialCrc]] = {}
        self._arrived: dict[int, int] = {}
        self._missing = self._crcs.count(None)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # its own `with` may be cut off halfway
        self._failed = False
        self._cause: BaseException | None = None

    def add(self, record: int, start: int, length: int, crc: int) -> None:
        """Enter the CRC of bytes [start, start + length) of a record."""
        size = self._sizes[record]
        if length == size:
            self.add_many(record, (crc,))
            return
        with Locked(self._lock):
            pieces = self._pieces.setdefault(record, [])
            pieces.append(PartialCrc(record, start, length, crc))
            self._arrived[record] = self._arrived.get(record, 0) + length
            if self._arrived[record] < size:
                return
            total, known = joined_crc(pieces)
            if known < size:  # a load reads bytes twice, and has not read others yet
                self._arrived[record] = known  # so that not each piece joins all again
                return
            del self._pieces[record]
        self.add_many(record, (total,))

    def add_many(self, first: int, crcs: Sequence[int]) -> None:
        """Enter the CRCs of whole records, from record `first` on; again does no harm."""
        stop = first + len(crcs)
        with Locked(self._lock):
            self._missing -= self._crcs[first:stop].count(None)
            self._crcs[first:stop] = crcs
            self._changed.notify_all()

    def pieces(self) -> list[PartialCrc]:
        """Return what is known so far, to be entered in the ledger of another writer."""
        with Locked(self._lock):
            found = [piece for pieces in self._pieces.values() for piece in pieces]
            columns = enumerate(zip(self._crcs, self._sizes, strict=True))
            whole = [
                PartialCrc(record, 0, size, crc)
                for record, (crc, size) in columns
                if crc is not None
            ]
        return found + whole

    def wait(self, record: int) -> int:
        """Return a record's CRC, waiting for pieces that other threads are copying."""
        crc = self._crcs[record]
        if crc is None:
            with Locked(self._lock):
                self._changed.wait_for(lambda: self._crcs[record] is not None or self._failed)
            crc = self._crcs[record]
            if crc is None:
                raise self._cause or TransferAbandonedError("it failed in another thread")
        return crc

    def wait_all(self) -> Sequence[int]:
        """Return the CRCs of all records, waiting for them."""
        with Locked(self._lock):
            self._changed.wait_for(lambda: not self._missing or self._failed)
            if self._missing:
                raise self._cause or TransferAbandonedError("it failed in another thread")
        return cast("list[int]", self._crcs)

    def fail(self, cause: BaseException | None = None) -> None:
        """Wake all waiting threads: what they wait for will not come. They raise the cause."""
        with Locked(self._lock):
            self._failed = True
            self._cause = self._cause or cause
            self._changed.notify_all()

    def end(self) -> None:
        """Forget the cause, whose traceback leads to this ledger; nobody waits any more."""
        self._cause = None
