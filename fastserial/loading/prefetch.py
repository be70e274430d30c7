"""The storages of a zip checkpoint, read ahead of torch's unpickler.

One read of the central directory says where every record is. A thread reads the records in
the order of their keys, which is the order in which pickles ask for them and, in files of torch
2.7 and later, that of the file. Neighbours get their memory, are read, and arrive together.

All memory is allocated by the thread that unpickles: malloc keeps what was freed for the thread
that allocated it, and memory that was used before needs no page faults.
"""

from __future__ import annotations

import contextvars
import enum
import logging
import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from time import perf_counter

import torch

from fastserial import trace
from fastserial.config.performance import LOOK_AHEAD, NEAR_EXTENTS, READ_TOGETHER
from fastserial.errors import CorruptCheckpointError
from fastserial.formats.zip.directory import RecordEntry
from fastserial.interrupts import Background, finish
from fastserial.loading.arriving import OnHost, RecordChecks
from fastserial.loading.planner import plan_blocks
from fastserial.loading.pump import Block, Delivery
from fastserial.loading.reader import FastFileReader
from fastserial.loading.sinks import ReadExtent
from fastserial.memory.huge_pages import HugePages

__all__ = ["Prefetch"]

_log = logging.getLogger("fastserial")
_DIGITS = 20  # of a key that is looked at


class _State(enum.Enum):
    """Of the storages of one batch. The thread named takes the step to the next."""

    PLANNED = enum.auto()  # without memory: the caller's allocates it
    ALLOCATED = enum.auto()  # the reading one starts to read it
    READING = enum.auto()  # the engine's deliver its blocks
    THERE = enum.auto()


class _Batch:
    """Neighbouring records.

    Attributes:
        records: in the order of the file.
        order: of reading.
        nbytes: of their data.
        state: of their storages.
        left: blocks that have not arrived.
    """

    __slots__ = ("_arriving", "left", "nbytes", "order", "records", "state")

    def __init__(self, records: Sequence[RecordEntry], order: int) -> None:
        self.records = records
        self.order = order
        self.nbytes = sum(record.size for record in records)
        self.state = _State.PLANNED
        self.left = 0
        self._arriving: dict[str, OnHost] = {}

    def allocate(self, alignment: int) -> None:
        """Allocate the storages; `alignment`: of direct reads (bytes), 0 without.

        Raises:
            RuntimeError: there is no memory.
        """
        self._arriving = {record.name: OnHost(record, alignment) for record in self.records}
        self.state = _State.ALLOCATED

    def memory(self) -> list[tuple[int, int]]:
        """Return address and length of what each record takes."""
        return [one.memory for one in self._arriving.values()]

    def reads(self, checks: RecordChecks) -> list[ReadExtent]:
        """Return what to read."""
        return [read for one in self._arriving.values() for read in one.reads(checks)]

    def take(self, record: RecordEntry) -> OnHost:
        """Return a record that came, once."""
        return self._arriving.pop(record.name)


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
        self._pump = file.blocks
        policy = self._pump.policy
        self._alignment = 0 if policy.never_direct else policy.alignment
        self._pages = HugePages()
        self._batches = _batches(records)
        self._places = {
            record.name: (batch, record) for batch in self._batches for record in batch.records
        }
        self._checks = RecordChecks(file.name, records, verify)
        self._next = 0  # batch that the thread reads next
        self._provided = 0  # batches that have memory, but for those that were waited for
        self._wanted: _Batch | None = None
        self._held = 0  # bytes of records that have memory and were not taken
        self._lock = threading.Lock()  # of the engine's threads, where nothing interrupts
        # Each thread waits for something in its queue, and then looks at what has changed.
        self._arrivals: SimpleQueue[object] = SimpleQueue()  # for the caller's
        self._nudges: SimpleQueue[object] = SimpleQueue()  # for the one that reads
        self._error: BaseException | None = None
        self._finished = self._closed = False
        self._owner: weakref.ref[object] = weakref.ref(self)
        self._thread = Background()
        nbytes = sum(batch.nbytes for batch in self._batches)
        self._pump.expect(0, file.size, nbytes)
        file.bar.expect(nbytes)

    def start(self, owner: object = None) -> bool:
        """Start reading; False if no thread can be started.

        Args:
            owner: once no reference to it is left, reading ends as if closed.
        """
        self._owner = weakref.ref(self if owner is None else owner, self._nudges.put)
        if not self._thread.start(contextvars.copy_context().run, self._run):
            return False  # nor is memory taken: torch aborts if it goes while the program ends
        self._provide()
        return True

    def take(self, name: str, nbytes: int) -> torch.UntypedStorage | None:
        """Return a record of `nbytes` bytes, once: the caller owns it then.

        None: torch must read this record itself (not one of ours, asked for before, of another
        size, or its local header is not where it should be).

        Raises:
            CorruptCheckpointError: the record is damaged (`verify`), or the file became shorter.
        """
        found = self._places.pop(name, None)
        if found is None:
            return None
        batch, record = found
        if batch.state is not _State.THERE and not self._wait(batch):
            return None
        self._release(record.size)
        return self._checks.accept(batch.take(record), nbytes)

    @property
    def error(self) -> BaseException | None:
        """What ended the reading before its time: torch must read the rest."""
        return self._error

    def close(self) -> None:
        """Stop, waiting only for reads under way. Idempotent."""
        self._closed = True
        self._nudges.put(None)
        finish(self._thread.join)
        self._checks.give_up()
        self._places.clear()
        self._batches.clear()

    # -- the caller's thread -------------------------------------------------------------------

    def _provide(self) -> None:
        """Allocate memory for what comes next, as far as the look-ahead goes."""
        while self._provided < len(self._batches):
            batch = self._batches[self._provided]
            if batch.state is _State.PLANNED:
                if self._held and self._held + batch.nbytes > LOOK_AHEAD:
                    break
                try:
                    self._allocate(batch)
                except RuntimeError:  # no memory: it is an error once it is needed
                    break
            self._provided += 1
        self._nudges.put(None)

    def _allocate(self, batch: _Batch) -> None:
        batch.allocate(self._alignment)
        self._held += batch.nbytes

    def _wait(self, batch: _Batch) -> bool:
        """Wait for a batch; False: it will not come, and torch's own way may say why."""
        began = perf_counter()
        if batch.state is _State.PLANNED:
            self._allocate(batch)
        self._wanted = batch
        self._nudges.put(None)
        while batch.state is not _State.THERE and not self._finished:
            self._arrivals.get()
        self._wanted = None
        ended = perf_counter()
        self.wait_seconds += ended - began
        trace.emit("wait for a storage", began, ended)
        there = batch.state is _State.THERE
        if not there and isinstance(self._error, CorruptCheckpointError):
            raise self._error
        return there

    def _release(self, nbytes: int) -> None:
        self._held -= nbytes
        if self._provided < len(self._batches):
            self._provide()

    # -- the thread that reads -----------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._pump.read(self._blocks(), self._is_over)
        except BaseException as caught:  # for the thread that unpickles
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

    def _blocks(self) -> Iterator[Block | None]:
        """Yield the blocks to read, None where memory must be waited for."""
        while not self._is_over():
            batch = self._chosen()
            if batch is None:
                return
            if batch.state is _State.PLANNED:
                yield None
                if self._pump.in_flight:
                    self._pump.reap()
                else:
                    self._nudges.get()
                continue
            batch.state = _State.READING
            blocks = list(plan_blocks(batch.reads(self._checks), self._pump))
            blocks[0].prepare = partial(self._pages.advise_all, batch.memory())
            batch.left = len(blocks)
            for block in blocks:
                block.deliver = partial(self._arrived, batch, block.deliver)
                yield block

    def _chosen(self) -> _Batch | None:
        """Return the batch to read next: the one waited for, or the next; None: there is none."""
        unread = _State.PLANNED, _State.ALLOCATED
        batch = self._wanted
        if batch is not None and batch.state in unread:
            return batch
        while self._next < len(self._batches) and self._batches[self._next].state not in unread:
            self._next += 1
        return self._batches[self._next] if self._next < len(self._batches) else None

    def _is_over(self) -> bool:
        return self._closed or self._owner() is None

    # -- the engine's threads ------------------------------------------------------------------

    def _arrived(self, batch: _Batch, deliver: Delivery, view: memoryview, address: int) -> None:
        """Deliver a block, and take note of it."""
        deliver(view, address)
        with self._lock:
            batch.left -= 1
            if batch.left:
                return
            batch.state = _State.THERE
        self._arrivals.put(None)


def _batches(records: Sequence[RecordEntry]) -> list[_Batch]:
    """Return records in batches, in the order of reading.

    That is the order of their keys, in which pickles ask for them, and in files of torch 2.7 and
    later the order of the file.
    """
    keyed = sorted(
        ((_order(record, index), record) for index, record in enumerate(records)),
        key=lambda item: item[1].header_offset,
    )
    found: list[_Batch] = []
    group: list[RecordEntry] = []
    order = 0
    for number, record in keyed:
        if group:
            hole = record.header_offset - group[-1].data_end
            length = record.data_end - group[0].header_offset
            if not 0 <= hole <= NEAR_EXTENTS or length > READ_TOGETHER:
                found.append(_Batch(group, order))
                group = []
        order = min(order, number) if group else number
        group.append(record)
    if group:
        found.append(_Batch(group, order))
    return sorted(found, key=lambda batch: batch.order)


def _order(record: RecordEntry, index: int) -> int:
    try:
        return int(record.name[len("data/") :][:_DIGITS])
    except ValueError:
        return index
