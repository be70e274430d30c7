"""The storages of a zip checkpoint, read ahead of torch's unpickler.

One read of the central directory says where every record is. A thread reads the records in
the order of their keys, which is the order in which pickles ask for them and, in files of torch
2.7 and later, that of the file. `loading.units` says how they get their memory.

All memory is allocated by the thread that unpickles: malloc keeps what was freed for the thread
that allocated it, and memory that was used before needs no page faults.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import torch

from fastserial import trace
from fastserial.config.performance import LOOK_AHEAD
from fastserial.errors import CorruptCheckpointError
from fastserial.formats.zip.directory import RecordEntry
from fastserial.interrupts import Background, finish
from fastserial.loading.block_reader import Block, BlockReader
from fastserial.loading.prefetch_plan import plan_aligned, plan_scattered
from fastserial.loading.reader import FastFileReader
from fastserial.loading.record_checks import RecordChecks
from fastserial.loading.units import Unit
from fastserial.memory.huge_pages import HugePages

__all__ = ["Prefetch"]

_log = logging.getLogger("fastserial")
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
        self._verify = verify
        self._pages = HugePages()
        self._units = self._planned(records)
        self._places = {
            record.name: (unit, record) for unit in self._units for record in unit.records
        }
        self._checks = RecordChecks(file.name, records)
        self._ends = {record.name: record.data_end for record in records}
        self._next = 0  # unit that the thread reads next
        self._provided = 0  # units that have memory, but for those that were waited for
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

    def _planned(self, records: Sequence[RecordEntry]) -> list[Unit]:
        blocks, config = self._blocks, self._file.config
        blocks.expect(0, self._file.size, sum(record.size for record in records))
        if blocks.never_direct and blocks.takes_any_memory:
            return plan_scattered(records)
        return plan_aligned(records, blocks.alignment, config.block_size, self._file.size)

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
        if unit is None or not (unit.is_there or self._wait(unit)):
            return None
        self._release(record.size)
        storage: torch.UntypedStorage | None = unit.take(record)
        if self._verify:
            self._checks.check(record, storage is not None)
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
        self._checks.give_up()
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
                    unit.allocate()
                except RuntimeError:  # no memory: it is an error once it is needed
                    break
                self._held += unit.nbytes
            self._provided += 1
        self._nudges.put(None)

    def _wait(self, unit: Unit) -> bool:
        """Wait for a unit; False: it will not come, and torch's own way may say why."""
        began = perf_counter()
        if not unit.provided:
            unit.allocate()
            self._held += unit.nbytes
        self._wanted = unit
        self._nudges.put(None)
        while not unit.is_there and not self._finished:
            self._arrivals.get()
        self._wanted = None
        ended = perf_counter()
        self.wait_seconds += ended - began
        trace.tell("wait for a storage", began, ended)
        if not unit.is_there and isinstance(self._error, CorruptCheckpointError):
            raise self._error
        return unit.is_there

    def _release(self, nbytes: int) -> None:
        self._held -= nbytes
        if self._provided < len(self._units):
            self._provide()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            for block in self._blocks.ordered(self._in_order()):
                if self._is_over():
                    break
                self._blocks.put(block)
            if not self._is_over():
                self._blocks.drain()
        except BaseException as caught:  # handed to the thread that unpickles
            error = caught
            if isinstance(error, CorruptCheckpointError):
                error.path = error.path or self._file.name
            else:
                _log.debug("reading ahead of %r ended: %r", self._file.name, error)
        self._checks.give_up()
        self._error = error
        self._finished = True
        self._arrivals.put(None)
        self._file.close()

    def _in_order(self) -> Iterator[Block | None]:
        """Yield the blocks to read, None where memory must be waited for."""
        size = self._blocks.best_size
        while not self._is_over():
            unit = self._chosen()
            if unit is None:
                return
            if unit.provided:
                unit.started = True
                yield from unit.blocks(self._blocks, size, self, self._pages)
                continue
            yield None
            if self._blocks.in_flight:
                self._blocks.reap()
            else:
                self._nudges.get()

    def _chosen(self) -> Unit | None:
        """Return the unit to read next: the one waited for, or the next; None: there is none."""
        unit = self._wanted
        if unit is not None and not unit.started:
            return unit
        while self._next < len(self._units) and self._units[self._next].started:
            self._next += 1
        return self._units[self._next] if self._next < len(self._units) else None

    def _is_over(self) -> bool:
        return self._closed or self._owner() is None

    # -- the engine's threads ------------------------------------------------------------------

    def note(self, unit: Unit, nbytes: int) -> None:
        """Take note that so many bytes of a unit's range are in their places."""
        with self._lock:
            unit.arrived += nbytes
        if unit.is_there:
            self._arrivals.put(None)

    def see(self, record: RecordEntry, start: int, view: memoryview) -> None:
        """Look at the bytes of a record from byte `start` on, in order to check them."""
        if self._verify:
            self._checks.see(record, start, view)
