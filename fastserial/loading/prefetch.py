"""The storages of a zip checkpoint, read ahead of torch's unpickler.

One read of the central directory says where every record is. A thread reads the records in
the order of their keys, which is the order in which pickles ask for them and, in files of torch
2.7 and later, that of the file. Neighbouring records are allocated, read and delivered together.

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
from fastserial.loading.arriving import HostRecord, RecordChecks
from fastserial.loading.planner import plan_blocks
from fastserial.loading.pump import Block, Delivery
from fastserial.loading.reader import FastFileReader
from fastserial.loading.sinks import ReadExtent
from fastserial.memory.huge_pages import HugePages

__all__ = ["Prefetch"]

_log = logging.getLogger("fastserial")
_DIGITS = 20  # of a key that is looked at


class _State(enum.Enum):
    """State of the storages of one group; the comment names the thread that makes the next step."""

    PLANNED = enum.auto()  # without memory: the caller's thread allocates it
    ALLOCATED = enum.auto()  # the reading thread starts to read it
    READING = enum.auto()  # the engine's threads deliver its blocks
    COMPLETE = enum.auto()


class _RecordGroup:
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
        self._arriving: dict[str, HostRecord] = {}

    def allocate(self, alignment: int) -> None:
        """Allocate the storages; `alignment`: of direct reads (bytes), 0 without.

        Raises:
            RuntimeError: there is no memory.
        """
        self._arriving = {record.name: HostRecord(record, alignment) for record in self.records}
        self.state = _State.ALLOCATED

    def memory(self) -> list[tuple[int, int]]:
        """Return address and length of what each record takes."""
        return [one.memory for one in self._arriving.values()]

    def reads(self, checks: RecordChecks) -> list[ReadExtent]:
        """Return what to read."""
        return [read for one in self._arriving.values() for read in one.reads(checks)]

    def take(self, record: RecordEntry) -> HostRecord:
        """Return a record that has arrived, once."""
        return self._arriving.pop(record.name)


class Prefetch:
    """Reads records on a separate thread, from `start` to `close`."""

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
        self._groups = _groups_of(records)
        self._by_name = {
            record.name: (group, record) for group in self._groups for record in group.records
        }
        self._checks = RecordChecks(file.name, records, verify)
        self._next = 0  # group that the thread reads next
        self._provided = 0  # groups that have memory, but for those that were waited for
        self._wanted: _RecordGroup | None = None  # that the caller waits for
        self._held = 0  # bytes of records that have memory and were not taken
        self._lock = threading.Lock()  # of the engine's threads, where nothing interrupts
        # Each thread waits for anything in its queue, and then checks what has changed.
        self._arrivals: SimpleQueue[object] = SimpleQueue()  # for the caller's
        self._nudges: SimpleQueue[object] = SimpleQueue()  # for the one that reads
        self._error: BaseException | None = None
        self._finished = self._closed = False
        self._owner: weakref.ref[object] = weakref.ref(self)
        self._thread = Background()
        nbytes = sum(group.nbytes for group in self._groups)
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

        None: torch must read this record itself (it was not planned, was taken before, has another
        size, or its local header is not where it should be).

        Raises:
            CorruptCheckpointError: the record is damaged (`verify`), or the file became shorter.
        """
        found = self._by_name.pop(name, None)
        if found is None:
            return None
        group, record = found
        if group.state is not _State.COMPLETE and not self._wait(group):
            return None
        self._release(record.size)
        return self._checks.accept(group.take(record), nbytes)

    @property
    def error(self) -> BaseException | None:
        """What ended the reading early: torch must read the rest."""
        return self._error

    def close(self) -> None:
        """Stop, waiting only for reads in progress. Idempotent."""
        self._closed = True
        self._nudges.put(None)
        finish(self._thread.join)
        self._checks.give_up()
        self._by_name.clear()
        self._groups.clear()

    # -- the caller's thread -------------------------------------------------------------------

    def _provide(self) -> None:
        """Allocate memory for the next groups, up to the limit of the look-ahead."""
        while self._provided < len(self._groups):
            group = self._groups[self._provided]
            if group.state is _State.PLANNED:
                if self._held and self._held + group.nbytes > LOOK_AHEAD:
                    break
                try:
                    self._allocate(group)
                except RuntimeError:  # no memory: an error only if it is needed
                    break
            self._provided += 1
        self._nudges.put(None)

    def _allocate(self, group: _RecordGroup) -> None:
        group.allocate(self._alignment)
        self._held += group.nbytes

    def _wait(self, group: _RecordGroup) -> bool:
        """Wait for a group; False: it will not arrive, and torch's own reader may say why."""
        began = perf_counter()
        if group.state is _State.PLANNED:
            self._allocate(group)
        self._wanted = group
        self._nudges.put(None)
        while group.state is not _State.COMPLETE and not self._finished:
            self._arrivals.get()
        self._wanted = None
        ended = perf_counter()
        self.wait_seconds += ended - began
        trace.emit("wait for a storage", began, ended)
        there = group.state is _State.COMPLETE
        if not there and isinstance(self._error, CorruptCheckpointError):
            raise self._error
        return there

    def _release(self, nbytes: int) -> None:
        self._held -= nbytes
        if self._provided < len(self._groups):
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
            group = self._chosen()
            if group is None:
                return
            if group.state is _State.PLANNED:
                yield None
                if self._pump.in_flight:
                    self._pump.reap()
                else:
                    self._nudges.get()
                continue
            group.state = _State.READING
            blocks = list(plan_blocks(group.reads(self._checks), self._pump))
            blocks[0].prepare = partial(self._pages.advise_all, group.memory())
            group.left = len(blocks)
            for block in blocks:
                block.deliver = partial(self._arrived, group, block.deliver)
                yield block

    def _chosen(self) -> _RecordGroup | None:
        """Return the group that is waited for, else the next one; None: all are read."""
        unread = _State.PLANNED, _State.ALLOCATED
        group = self._wanted
        if group is not None and group.state in unread:
            return group
        while self._next < len(self._groups) and self._groups[self._next].state not in unread:
            self._next += 1
        return self._groups[self._next] if self._next < len(self._groups) else None

    def _is_over(self) -> bool:
        return self._closed or self._owner() is None

    # -- the engine's threads ------------------------------------------------------------------

    def _arrived(
        self, group: _RecordGroup, deliver: Delivery, view: memoryview, address: int
    ) -> None:
        """Deliver a block, and count it."""
        deliver(view, address)
        with self._lock:
            group.left -= 1
            if group.left:
                return
            group.state = _State.COMPLETE
        self._arrivals.put(None)


def _groups_of(records: Sequence[RecordEntry]) -> list[_RecordGroup]:
    """Return records in groups, in the order of reading.

    That is the order of their keys, in which pickles ask for them, and in files of torch 2.7 and
    later the order of the file.
    """
    keyed = sorted(
        ((_order(record, index), record) for index, record in enumerate(records)),
        key=lambda item: item[1].header_offset,
    )
    found: list[_RecordGroup] = []
    near: list[RecordEntry] = []
    order = 0
    for number, record in keyed:
        if near:
            hole = record.header_offset - near[-1].data_end
            length = record.data_end - near[0].header_offset
            if not 0 <= hole <= NEAR_EXTENTS or length > READ_TOGETHER:
                found.append(_RecordGroup(near, order))
                near = []
        order = min(order, number) if near else number
        near.append(record)
    if near:
        found.append(_RecordGroup(near, order))
    return sorted(found, key=lambda group: group.order)


def _order(record: RecordEntry, index: int) -> int:
    try:
        return int(record.name[len("data/") :][:_DIGITS])
    except ValueError:
        return index
