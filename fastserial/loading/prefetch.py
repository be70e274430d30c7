"""The storages of a zip checkpoint, read ahead of torch's unpickler, which asks for records.

One read of the central directory says where every record is. The records are read in the order of
their keys, which is the order in which pickles ask for them and, in files of torch 2.7 and later,
that of the file. Neighbouring records are allocated, read and delivered together.

Everything but the reads themselves happens in the thread that unpickles, whenever it asks for a
record: it allocates memory, submits blocks and reaps them. So there is no state that two threads
share. malloc, which keeps freed memory for the thread that allocated it, finds memory that was used
before and needs no page faults.

`FastZipReader` stands in for torch's PyTorchFileReader in `_load`. torch's own reader still reads
the pickle, the small records, and every storage that is not as expected.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import torch

from fastserial.checksums import CrcLedger, check_crc, crc32
from fastserial.config.performance import (
    BLOCK_SIZE,
    IN_PLACE,
    LOOK_AHEAD,
    NEAR_EXTENTS,
    READ_TOGETHER,
)
from fastserial.errors import CorruptCheckpointError, EngineError
from fastserial.formats.zip_format import (
    LOCAL,
    LOCAL_LENGTHS,
    LOCAL_SIGNATURE,
    Directory,
    RecordEntry,
)
from fastserial.interrupts import finish_after, ours
from fastserial.loading.pump import Block
from fastserial.loading.reader import (
    CheckedSink,
    FastFileReader,
    HostSink,
    ReadExtent,
    Sink,
    plan_blocks,
    storage_sink,
)
from fastserial.memory.huge_pages import HugePages
from fastserial.memory.storages import new_storage

if TYPE_CHECKING:
    from fastserial.memory.buffers import Ring

_log = logging.getLogger("fastserial")
_DIGITS = 20  # of a key that is looked at
_ALIGNMENT = 64  # of torch's own memory (bytes)

# Returns a sink that also checksums the bytes of a record if they are to be verified. The integer
# says where in the record's data they begin; negative: with what lies before it.
_Checked = Callable[[RecordEntry, Sink, int], Sink]


class _HostRecord:
    """A record in host memory, laid out as in the file: its header, then its data.

    Attributes:
        storage: its data.
        memory: address and length of all that it takes.
    """

    __slots__ = ("__weakref__", "_head", "_spare", "entry", "memory", "storage")

    def __init__(self, entry: RecordEntry, alignment: int) -> None:
        """Allocate its memory.

        Args:
            entry: stored, not empty.
            alignment: of direct reads (bytes): a large record has the same offset in memory as in
                the file, modulo this, with space around it, so that whole blocks can be read there.
                0: there are no direct reads.

        Raises:
            RuntimeError: there is no memory.
        """
        self.entry = entry
        self._head = entry.data_offset - entry.header_offset
        large = entry.size >= IN_PLACE and not entry.data_offset % _ALIGNMENT
        self._spare = alignment if large else 0
        start = self._spare + self._head + -self._head % _ALIGNMENT
        nbytes = start + entry.size + 2 * self._spare
        memory = new_storage(nbytes)
        self.memory = memory.data_ptr(), nbytes
        if self._spare:
            start += (entry.data_offset - self.memory[0] - start) % alignment
        # a part: like what torch reads from a zip, it cannot be resized
        self.storage = cast("torch.UntypedStorage", memory[start : start + entry.size])

    def reads(self, checked: _Checked, ring: Ring | None) -> list[ReadExtent]:
        """Return what to read; `ring`: the staging buffers of bytes for devices."""
        entry, head = self.entry, self._head
        length = head + entry.size
        sink = HostSink(self.storage.data_ptr() - head, length, self.storage, self._spare)
        return [ReadExtent(entry.header_offset, length, checked(entry, sink, -head))]

    def header(self) -> bytes:
        """Return what lies between the record's beginning and its data, once all has arrived."""
        return _bytes_at(self.storage.data_ptr() - self._head, self._head)


def _bytes_at(address: int, nbytes: int) -> bytes:
    return (ctypes.c_char * nbytes).from_address(address).raw


class _DeviceRecord:
    """A record whose data is read to a device."""

    __slots__ = ("_header", "entry", "storage")

    def __init__(self, entry: RecordEntry, device: torch.device) -> None:
        """Allocate its memory.

        Raises:
            RuntimeError: there is no memory.
        """
        self.entry = entry
        make: Any = torch.UntypedStorage
        self.storage: torch.UntypedStorage = make(entry.size, device=device)
        self._header = new_storage(entry.data_offset - entry.header_offset)

    def reads(self, checked: _Checked, ring: Ring | None) -> list[ReadExtent]:
        """Return what to read, as `_HostRecord.reads`."""
        entry, header = self.entry, self._header
        head = HostSink(header.data_ptr(), header.nbytes(), header)
        return [
            ReadExtent(entry.header_offset, head.nbytes, head),
            ReadExtent(
                entry.data_offset, entry.size, checked(entry, storage_sink(self.storage, ring), 0)
            ),
        ]

    def header(self) -> bytes:
        """Return the bytes before the data, as `_HostRecord.header`."""
        return _bytes_at(self._header.data_ptr(), self._header.nbytes())


class _RecordGroup:
    """Neighbouring records.

    Attributes:
        entries: in the order of the file.
        order: of reading.
        nbytes: of their data.
        records: those that were allocated and not taken, by name.
        left: blocks that have not arrived; None: they are not planned, and there is no memory.
    """

    __slots__ = ("entries", "left", "nbytes", "order", "records")

    def __init__(self, entries: Sequence[RecordEntry], order: int) -> None:
        self.entries = entries
        self.order = order
        self.nbytes = sum(entry.size for entry in entries)
        self.records: dict[str, _HostRecord | _DeviceRecord] = {}
        self.left: int | None = None

    def count(self, block: Block) -> None:
        """Note that one of its blocks has arrived."""
        self.left = (self.left or 0) - 1


class Prefetch:
    """Reads records from `start` to `close`, up to a limit ahead of what is taken.

    Attributes:
        error: what ended the reading early: torch must read the rest.
        wait_seconds: how long the caller waited for records.
    """

    def __init__(
        self,
        file: FastFileReader,
        entries: Sequence[RecordEntry],
        verify: bool,
        device: torch.device | None = None,
    ) -> None:
        """Plan to read stored, not empty records.

        Args:
            file: nothing else reads from it; closed by `close`.
            entries: what to read; their `data_offset` may be wrong (see `take`).
            verify: check each record's CRC-32.
            device: where they are to go; None: host memory. To a device all records are read
                together, once one is asked for, and none is ever whole in host memory.
        """
        self.error: BaseException | None = None
        self.wait_seconds = 0.0
        self._file = file
        self._pid = os.getpid()
        self._pump = file.blocks
        self._device = device
        policy = self._pump.policy
        self._alignment = 0 if policy.never_direct or device is not None else policy.alignment
        self._pages = HugePages()
        self._unread = _groups_of(entries) if device is None else [_RecordGroup(entries, 0)]
        self._group_of = {entry.name: group for group in self._unread for entry in group.entries}
        self._wanted: _RecordGroup | None = None  # that the caller waits for
        self._held = 0  # bytes of records that have memory and were not taken
        self._taken = 0  # bytes of records since blocks were last submitted
        self._ledger: CrcLedger | None = None
        if verify:
            self._index = {entry.name: index for index, entry in enumerate(entries)}
            self._ledger = CrcLedger([entry.size for entry in entries], [None] * len(entries))
        file.expect(0, file.size, sum(group.nbytes for group in self._unread))
        self._blocks = self._pump.ordered(self._planned())

    def start(self) -> None:
        """Start to read. What it raises comes from a signal handler."""
        self._advance(0)

    def take(self, name: str, nbytes: int) -> torch.UntypedStorage | None:
        """Return a record of `nbytes` bytes, once: the caller owns it then.

        None: torch must read this record itself (it was not planned, was taken before, has another
        size, or its local header is not where it should be).

        Raises:
            CorruptCheckpointError: the record is damaged (`verify`), or the file became shorter.
        """
        group = self._group_of.pop(name, None)
        if group is None or not self._wait(group):
            return None
        record = group.records.pop(name)
        self._held -= record.entry.size
        self._taken += record.entry.size
        if self._taken >= min(self._pump.block_size, BLOCK_SIZE):  # not for each small record
            self._taken = 0
            self._advance(0)
        return self._accepted(record, nbytes)

    def close(self) -> None:
        """Stop, waiting only for reads in progress. Idempotent."""
        self._file.close()
        self._blocks = iter(())  # its frame refers to this object, and to memory
        self._group_of.clear()
        self._unread.clear()

    # -- reading -------------------------------------------------------------------------------

    def _wait(self, group: _RecordGroup) -> bool:
        """Wait for a group; False: it will not arrive, and torch's own reader may say why."""
        if group.left != 0:
            began = perf_counter()
            self._wanted = group
            while group.left != 0 and self._advance(1):
                pass
            if group.left is None:  # lanes passed on that no block was known, before one was wanted
                while group.left != 0 and self._advance(1):
                    pass
            self._wanted = None
            self.wait_seconds += perf_counter() - began
            if group.left != 0:
                if isinstance(self.error, CorruptCheckpointError):
                    raise self.error
                return False
        if self._file.ring is not None:
            self._file.ring.settle()
        return True

    def _advance(self, minimum: int) -> bool:
        """Reap at least `minimum` blocks, and submit others; False: none is in flight."""
        pump = self._pump
        if os.getpid() != self._pid:  # the reads are the parent's
            self.error = self.error or EngineError("the process was forked during the load")
            return False
        try:
            if pump.in_flight:
                pump.reap(minimum)
            while pump.has_room:
                block = next(self._blocks, None)
                if block is None:
                    break
                pump.put(block)
            pump.flush()
        except BaseException as error:
            self._blocks = iter(())
            finish_after(error, pump.close)
            if error is not pump.error:
                raise  # of a signal handler
            self.error = error
            if isinstance(error, CorruptCheckpointError):
                error.path = error.path or self._file.name
            _log.debug("reading ahead of %r ended: %r", self._file.name, error)
        return pump.in_flight > 0

    def _planned(self) -> Iterator[Block | None]:
        """Yield the blocks to read, None while the look-ahead is used up."""
        while self._unread:
            group = self._unread[0]
            wanted = self._wanted
            if wanted is not None and wanted.left is None:
                group = wanted
            elif self._held + group.nbytes > LOOK_AHEAD:  # the pickle may never ask for it
                yield None
                continue
            self._unread.remove(group)
            try:
                blocks = list(plan_blocks(self._allocated(group), self._pump))
            except ours(RuntimeError, MemoryError) as error:  # if it is needed, torch will say so
                group.records.clear()
                self.error = error.with_traceback(None)  # which would keep memory
                return
            self._held += group.nbytes
            group.left = len(blocks)
            kept = [one for one in group.records.values() if isinstance(one, _HostRecord)]
            memory = [record.memory for record in kept]
            blocks[0].prepare = partial(self._pages.advise_all, memory)
            for block in blocks:
                block.arrived = group.count
            yield from blocks

    def _allocated(self, group: _RecordGroup) -> list[ReadExtent]:
        """Allocate the memory of a group, and return what to read.

        Raises:
            RuntimeError, MemoryError: there is no memory, or a device failed.
        """
        device = self._device
        for entry in group.entries:
            group.records[entry.name] = (
                _HostRecord(entry, self._alignment)
                if device is None
                else _DeviceRecord(entry, device)
            )
        records = group.records.values()
        if device is not None:
            self._file.attend([record.storage for record in records])
        return [read for one in records for read in one.reads(self._checked, self._file.ring)]

    # -- what arrived --------------------------------------------------------------------------

    def _checked(self, entry: RecordEntry, sink: Sink, start: int) -> Sink:
        ledger = self._ledger
        return sink if ledger is None else CheckedSink(sink, ledger, self._index[entry.name], start)

    def _accepted(
        self, record: _HostRecord | _DeviceRecord, nbytes: int
    ) -> torch.UntypedStorage | None:
        """Return the storage of a record of `nbytes` bytes, all of which arrived.

        None: torch must read it itself: it has another size, or its local header is not where it
        should be.

        Raises:
            CorruptCheckpointError: it is damaged (`verify`).
        """
        entry = record.entry
        is_valid = _is_header(record.header(), entry)
        if self._ledger is not None:
            path, name, offset = self._file.name, entry.name, entry.data_offset
            if not is_valid:
                what = "its local header differs from the central directory"
                raise CorruptCheckpointError(what, path=path, record=name, offset=offset)
            if entry.crc:  # 0: written without
                found = self._ledger.wait(self._index[name])
                check_crc(found, entry.crc, path, name, offset)
        return record.storage if is_valid and entry.size == nbytes else None


def _is_header(data: bytes, entry: RecordEntry) -> bool:
    """Return whether these bytes, from which on a record's data follows, are its local header."""
    if len(data) < LOCAL.size:
        return False
    signature, name_length, extra_length = LOCAL_LENGTHS.unpack_from(data, 0)
    stop = LOCAL.size + name_length
    return (
        signature == LOCAL_SIGNATURE
        and stop + extra_length == len(data)
        and data[LOCAL.size : stop] == entry.full_name
    )


def _groups_of(entries: Sequence[RecordEntry]) -> list[_RecordGroup]:
    """Return records in groups, in the order of reading.

    That is the order of their keys, in which pickles ask for them, and in files of torch 2.7 and
    later the order of the file.
    """
    keyed = sorted(
        ((_order(entry, index), entry) for index, entry in enumerate(entries)),
        key=lambda item: item[1].header_offset,
    )
    found: list[_RecordGroup] = []
    near: list[RecordEntry] = []
    order = 0
    for number, entry in keyed:
        if near:
            hole = entry.header_offset - near[-1].data_end
            length = entry.data_end - near[0].header_offset
            if not 0 <= hole <= NEAR_EXTENTS or length > READ_TOGETHER:
                found.append(_RecordGroup(near, order))
                near = []
        order = min(order, number) if near else number
        near.append(entry)
    if near:
        found.append(_RecordGroup(near, order))
    return sorted(found, key=lambda group: group.order)


def _order(entry: RecordEntry, index: int) -> int:
    try:
        return int(entry.name[len("data/") :][:_DIGITS])
    except ours(ValueError):
        return index


class _Loaded:
    """What `_load` unpacks: `get_storage_from_record(...)._typed_storage()._untyped_storage`."""

    __slots__ = ("_untyped_storage",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._untyped_storage = storage

    def _typed_storage(self) -> _Loaded:
        return self


class FastZipReader:
    """Serves records to `_load`; everything else is delegated to torch's reader."""

    def __init__(
        self,
        stock: Any,
        path: str,
        limit: int,
        directory: Directory | None = None,
        prefetch: Prefetch | None = None,
        verify: bool = False,
        mapped: torch.UntypedStorage | None = None,
    ) -> None:
        """Wrap `stock`, a PyTorchFileReader on the same file.

        Args:
            stock: torch's reader.
            path: the file's name, for errors.
            limit: bytes that no record can exceed, whatever the file says of it.
            directory: the file's central directory; None: sizes come from torch's reader.
            prefetch: reads the storages ahead; None: torch reads them all.
            verify: also check the CRC-32 of what torch reads (needs the directory).
            mapped: the whole file, of which torch takes parts; they are checked likewise.
        """
        self.stock = stock
        self.position: int | None = None  # where torch would have left the file (bytes)
        self._path = path
        self._limit = limit
        known = directory.records if directory is not None else ()
        self._records: Mapping[str, RecordEntry] = {record.name: record for record in known}
        self._has_directory = directory is not None
        self._prefetch = prefetch
        self._verify = verify
        self._mapped = mapped

    def __getattr__(self, name: str) -> Any:
        if name.startswith("get_"):  # these may move the file
            self.position = None
        return getattr(self.stock, name)

    def get_record(self, name: str) -> bytes:
        """Return a record's bytes.

        Raises:
            RuntimeError: as torch's reader; `CorruptCheckpointError` if the record is damaged.
        """
        self.position = None
        self._size(name)
        data = cast("bytes", self.stock.get_record(name))
        self._check(name, data)
        return data

    def get_storage_from_record(self, name: str, numel: int, kind: Any) -> Any:
        """Return something that holds a storage of a record's first `numel` bytes.

        Raises:
            RuntimeError: as torch's reader; `CorruptCheckpointError` if the record is damaged.
        """
        if self._prefetch is not None and numel > 0 and kind is torch.UntypedStorage:
            storage = self._prefetch.take(name, numel)
            if storage is not None:
                self.position = self._records[name].data_end
                return _Loaded(storage)
        size = self._size(name)
        if size != 0:  # else torch does not touch the file
            self.position = None
        if size is not None and numel > size:  # older torch would read past its memory
            raise self._damaged(name, f"the pickle asks for {numel} bytes of {size}")
        found = self.stock.get_storage_from_record(name, numel, kind)
        if self._verify and numel and numel != size:
            self.get_record(name)  # all of it has the checksum
        elif self._verify and numel:
            address = found._typed_storage()._untyped_storage.data_ptr()
            self._check(name, (ctypes.c_char * numel).from_address(address))
        return found

    def get_record_offset(self, name: str) -> int:
        """Return where a record's data begins (bytes); errors as of `get_record`."""
        self.position = None
        offset = int(self.stock.get_record_offset(name))
        self._check_mapped(name, offset)
        return offset

    def get_record_offset_no_read(self, cursor: int, name: str, numel: int, alignment: int) -> int:
        """Return the same, as torch computes it; errors as of `get_record`."""
        self.position = None
        offset = int(self.stock.get_record_offset_no_read(cursor, name, numel, alignment))
        self._check_mapped(name, offset)
        return offset

    def _check_mapped(self, name: str, offset: int) -> None:
        """Check a record that torch takes from the mapped file."""
        record, mapped = self._records.get(name), self._mapped
        if record is None or mapped is None:
            return
        if offset + record.size > mapped.nbytes():
            raise self._damaged(name, "it ends behind the file")
        if record.size:
            data = (ctypes.c_char * record.size).from_address(mapped.data_ptr() + offset)
            self._check(name, data)

    def _size(self, name: str) -> int | None:
        """Return a record's size, None if there is no such record, which torch will say."""
        if self._has_directory:
            record = self._records.get(name)
            return None if record is None else record.size
        size = int(self.stock.get_record_size(name))
        if size > self._limit:
            raise self._damaged(name, f"{size} bytes are more than the file can hold")
        return size

    def _check(self, name: str, data: Any) -> None:
        record = self._records.get(name) if self._verify else None
        if record is not None and record.crc:
            check_crc(crc32(data), record.crc, self._path, name, record.data_offset)

    def _damaged(self, name: str, what: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(what, path=self._path, record=name)
