"""The storages of a zip checkpoint, read ahead of torch's unpickler.

One read of the central directory says where every record is. A thread reads the records in
the order of their keys, which is the order in which pickles ask for them and, in files of torch
2.7 and later, that of the file. A large record is read straight into memory of its own, as it
lies in the file, header included, and the storage is a slice of that memory; small neighbours
come in one read and are copied out.

All memory is allocated by the thread that unpickles: malloc keeps what was freed for the thread
that allocated it, and memory that was used before needs no page faults.
"""

from __future__ import annotations

import contextvars
import ctypes
import logging
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Any, cast

import torch

from fastserial import trace
from fastserial.checksums import CrcLedger, crc32
from fastserial.config.performance import LOOK_AHEAD, STRAIGHT_BLOCKS
from fastserial.errors import CorruptCheckpointError
from fastserial.formats.zip.directory import RecordEntry
from fastserial.interrupts import Background, finish
from fastserial.loading.block_reader import Block, BlockReader
from fastserial.loading.prefetch_plan import Unit, has_header, plan_units
from fastserial.loading.reader import FastFileReader
from fastserial.memory.buffers import Buffer, host_buffer
from fastserial.memory.huge_pages import HugePages
from fastserial.memory.storages import new_storage

__all__ = ["Prefetch"]

_log = logging.getLogger("fastserial")
_ALIGNMENT = 64  # of torch's own memory (bytes)

# Not `ctypes.memmove`: giving the interpreter up for a few bytes costs more than copying them.
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = None


# A small record's storage, a large one's unit, what is wrong with it, or: torch must read it.
_Arrived = torch.UntypedStorage | Unit | CorruptCheckpointError | None
_NOWHERE: tuple[Any, Any] = (None, None)


class Prefetch:
    """Reads records on a thread of its own, from `start` to `close`."""

    def __init__(self, file: FastFileReader, records: Sequence[RecordEntry], verify: bool) -> None:
        """Plan to read stored, not empty records.

        Args:
            file: nothing else reads from it until then; closed when all is read.
            records: what to read; their `data_offset` may be wrong (see `take`).
            verify: check each record's CRC-32.
        """
        self.wait_seconds = 0.0
        self._file = file
        self._blocks: BlockReader = file.blocks
        self._block_size = file.config.block_size
        self._verify = verify
        self._pages = HugePages()
        self._units = plan_units(records, file.blocks.alignment, file.config.block_size)
        self._places = {
            record.name: (unit, record) for unit in self._units for record in unit.records
        }
        self._ledger = CrcLedger([record.size for record in records], [None] * len(records))
        self._index = {record.name: index for index, record in enumerate(records)}
        self._ends = {record.name: record.data_end for record in records}
        self._next = 0  # unit that the thread reads next
        self._provided = 0  # units that have memory, but for those that were waited for
        self._ready: dict[str, _Arrived] = {}
        self._wanted: Unit | None = None
        self._held = 0  # bytes of records that have memory and were not taken
        self._lock = threading.Lock()  # of the engine's threads, where nothing interrupts
        # Each thread waits for something in its queue, and then looks at what has changed.
        self._arrivals: SimpleQueue[object] = SimpleQueue()  # for the caller's
        self._nudges: SimpleQueue[object] = SimpleQueue()  # for the one that reads
        self._error: BaseException | None = None
        self._finished = self._closed = False
        self._owner: weakref.ref[object] = weakref.ref(self)
        self._thread = Background()
        file.bar.expect(sum(unit.length for unit in self._units))

    def start(self, owner: object = None) -> bool:
        """Start reading; False if no thread can be started.

        Args:
            owner: once no reference to it is left, reading ends as if closed.
        """
        self._provide()
        self._owner = weakref.ref(self if owner is None else owner, self._nudges.put)
        return self._thread.start(contextvars.copy_context().run, self._run)

    def take(self, name: str, nbytes: int) -> torch.UntypedStorage | None:
        """Return a record of `nbytes` bytes, once: the caller owns it then.

        None: torch must read this record itself (not one of ours, asked for before, of another
        size, or its local header is not where it should be).

        Raises:
            CorruptCheckpointError: the record is damaged (`verify`), or the file became shorter.
        """
        unit, record = self._places.pop(name, _NOWHERE)
        if unit is None or (name not in self._ready and not self._wait(name, unit)):
            return None
        found = self._ready.pop(name)
        self._release(record.size)
        storage = self._slice(found, record) if isinstance(found, Unit) else found
        if isinstance(storage, CorruptCheckpointError):
            raise storage
        if storage is None and self._verify:
            raise self._damaged(record, "its local header differs from the central directory")
        return storage if storage is not None and storage.nbytes() == nbytes else None

    @property
    def error(self) -> BaseException | None:
        """What ended the reading before its time: torch must read the rest."""
        return self._error

    def end_of(self, name: str) -> int:
        """Return the offset of the first byte after a record's data."""
        return self._ends[name]

    def close(self) -> None:
        """Stop, waiting only for reads under way. Idempotent."""
        self._closed = True
        self._nudges.put(None)
        finish(self._thread.join)
        self._ledger.fail()
        self._ready.clear()
        self._places.clear()
        self._units.clear()

    # -- the caller's thread -------------------------------------------------------------------

    def _provide(self) -> None:
        """Allocate memory for what comes next, as far as the look-ahead goes."""
        units = self._units
        while self._provided < len(units):
            unit = units[self._provided]
            if not unit.provided:
                if self._held and self._held + unit.length > LOOK_AHEAD:
                    break
                try:
                    unit.allocate(self._blocks.alignment)
                except RuntimeError:  # no memory: it is an error once it is needed
                    break
                self._held += unit.nbytes
            self._provided += 1
        self._nudges.put(None)

    def _wait(self, name: str, unit: Unit) -> bool:
        """Wait for a record; False: it will not come, and torch's own way may say why."""
        began = perf_counter()
        if not unit.provided:
            unit.allocate(self._blocks.alignment)
            self._held += unit.nbytes
        self._wanted = unit
        self._nudges.put(None)
        while name not in self._ready and not self._finished:
            self._arrivals.get()
        self._wanted = None
        there = name in self._ready
        ended = perf_counter()
        self.wait_seconds += ended - began
        trace.tell("wait for a storage", began, ended)
        if not there and isinstance(self._error, CorruptCheckpointError):
            raise self._error
        return there

    def _release(self, nbytes: int) -> None:
        self._held -= nbytes
        if self._provided < len(self._units):
            self._provide()

    def _slice(
        self, unit: Unit, record: RecordEntry
    ) -> torch.UntypedStorage | CorruptCheckpointError | None:
        """Return a large record's storage, or None if its header is not as expected."""
        (memory,) = unit.memory
        unit.memory = []  # the caller's from here on
        head = record.data_offset - record.header_offset
        at = unit.base + record.header_offset - unit.offset
        with memoryview((ctypes.c_char * head).from_address(at)).cast("B") as view:
            if not has_header(view, 0, record):
                return None
        if self._verify:
            damage = self._damage(record, self._ledger.wait(self._index[record.name]))
            if damage is not None:
                return damage
        start = at + head - memory.data_ptr()
        if (at + head) % _ALIGNMENT:  # a file with another alignment of storages than torch's
            copy = new_storage(record.size)
            ctypes.memmove(copy.data_ptr(), at + head, record.size)
            return _part(copy, 0, record.size)
        return _part(memory, start, record.size)

    def _damage(self, record: RecordEntry, crc: int) -> CorruptCheckpointError | None:
        if crc == record.crc or not record.crc:  # 0: written without
            return None
        return self._damaged(record, f"its CRC-32 is {crc:#010x}, not {record.crc:#010x}")

    def _damaged(self, record: RecordEntry, what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            what, path=self._file.name, record=record.name, offset=record.data_offset
        )

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while (unit := self._choose()) is not None:
                if unit.is_large:
                    self._read_large(unit)
                else:
                    self._put(Block(unit.offset, self._clip(unit), partial(self._spread, unit)))
            if not self._is_over():
                self._blocks.drain()
        except BaseException as caught:  # handed to the thread that unpickles
            error = caught
            if isinstance(error, CorruptCheckpointError):
                error.path = error.path or self._file.name
            else:
                _log.debug("reading ahead of %r ended: %r", self._file.name, error)
        self._ledger.fail()
        self._error = error
        self._finished = True
        self._arrivals.put(None)
        self._file.close()

    def _choose(self) -> Unit | None:
        """Return the unit to read next: the one waited for, or the next that has memory."""
        while True:
            if self._is_over():
                return None
            unit = self._wanted
            if unit is None or unit.started:
                while self._next < len(self._units) and self._units[self._next].started:
                    self._next += 1
                if self._next == len(self._units):
                    return None
                unit = self._units[self._next]
            if unit.provided:
                unit.started = True
                return unit
            if self._blocks.in_flight:
                self._blocks.reap()
            else:
                self._nudges.get()

    def _is_over(self) -> bool:
        return self._closed or self._owner() is None

    def _clip(self, unit: Unit) -> int:
        return min(unit.length, self._file.size - unit.offset)

    def _read_large(self, unit: Unit) -> None:
        straight = self._blocks.takes_any_memory
        direct = self._blocks.goes_direct(unit.offset, self._clip(unit))
        self._pages.advise(unit.base, unit.length)
        whole = host_buffer(unit.base, unit.length) if straight else None
        size = self._block_size * (STRAIGHT_BLOCKS if straight else 1)
        stop = unit.offset + self._clip(unit)
        at = unit.offset
        while at < stop:
            end = min(stop, at - at % size + size)
            first = at - unit.offset
            part = None
            if whole is not None:
                part = Buffer(-1, whole.view[first : end - unit.offset], unit.base + first)
            self._put(Block(at, end - at, partial(self._arrive, unit, first), part), direct)
            at = end

    def _put(self, block: Block, direct: bool | None = None) -> None:
        if not self._is_over():
            self._blocks.put(block, direct)

    # -- the engine's threads ------------------------------------------------------------------

    def _arrive(self, unit: Unit, first: int, view: memoryview, address: int) -> None:
        """Deliver a block of a large record: `view` is its unit's bytes from `first` on."""
        if address != unit.base + first:
            ctypes.memmove(unit.base + first, address, len(view))
        record = unit.records[0]
        if self._verify:
            at = unit.offset + first
            begin = max(record.data_offset, at)
            end = min(record.data_end, at + len(view))
            if begin < end:
                crc = crc32(view[begin - at : end - at])
                start = begin - record.data_offset
                self._ledger.add(self._index[record.name], start, end - begin, crc)
        with self._lock:
            unit.arrived += len(view)
            arrived = unit.arrived
        if arrived >= self._clip(unit):
            self._ready[record.name] = unit
            self._arrivals.put(None)

    def _spread(self, unit: Unit, view: memoryview, address: int) -> None:
        """Deliver small neighbours: give each its own memory."""
        found: dict[str, _Arrived] = {}
        memory, unit.memory = unit.memory, []
        for record, storage in zip(unit.records, memory, strict=True):
            head = record.header_offset - unit.offset
            at = record.data_offset - unit.offset
            damage = None
            if not has_header(view, head, record):
                found[record.name] = None
                continue
            if self._verify:
                damage = self._damage(record, crc32(view[at : at + record.size]))
            _memmove(storage.data_ptr(), address + at, record.size)
            found[record.name] = damage or _part(storage, 0, record.size)
        self._ready.update(found)
        self._arrivals.put(None)


def _part(storage: torch.UntypedStorage, start: int, nbytes: int) -> torch.UntypedStorage:
    """Return part of a storage: like what torch reads from a zip, it cannot be resized."""
    return cast("torch.UntypedStorage", storage[start : start + nbytes])
