"""What is read at once of a zip checkpoint, and the memory that its records get.

Through the page cache the bytes go straight to the storages, many with one call (`Scattered`).
Direct reads take aligned ranges only: a large record is read as it lies in the file, header
included, and its storage is a slice of that memory (`AsItLies`); small neighbours come to a staging
buffer and are copied out (`CopiedOut`).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

from fastserial.config.performance import STRAIGHT_BLOCKS
from fastserial.formats.zip.structs import LOCAL, LOCAL_LENGTHS, LOCAL_SIGNATURE
from fastserial.loading.block_reader import Block, BlockReader
from fastserial.memory.buffers import Buffer, host_buffer
from fastserial.memory.huge_pages import HugePages
from fastserial.memory.storages import memmove, new_storage

if TYPE_CHECKING:
    import torch

    from fastserial.formats.zip.directory import RecordEntry

__all__ = ["Arrivals", "AsItLies", "CopiedOut", "Scattered", "Unit", "host_part", "is_header"]

_ALIGNMENT = 64  # of torch's own memory (bytes)


class Arrivals(Protocol):
    """Is told of what has come, on any thread."""

    def note(self, unit: Unit, nbytes: int) -> None:
        """Take note that so many bytes of a unit's range are in their places."""

    def see(self, record: RecordEntry, start: int, view: memoryview) -> None:
        """Look at the bytes of a record from byte `start` on, in order to check them."""


class Unit(abc.ABC):
    """Records that are read together.

    Attributes:
        records: in file order.
        order: its place in the order of reading.
        offset, length: the range of the file that is read (bytes).
        provided: `allocate` was called.
        started: its reading was started.
        arrived: bytes of the range that are in their places.
    """

    __slots__ = ("arrived", "length", "offset", "order", "provided", "records", "started")

    def __init__(self, records: Sequence[RecordEntry], order: int, offset: int, length: int):
        self.records = records
        self.order = order
        self.offset = offset
        self.length = length
        self.arrived = 0
        self.provided = False
        self.started = False

    @property
    def nbytes(self) -> int:
        """Bytes of its records."""
        return sum(record.size for record in self.records)

    @property
    def is_there(self) -> bool:
        """Whether all of it has come."""
        return self.arrived >= self.length

    @abc.abstractmethod
    def allocate(self) -> None:
        """Allocate the memory of its records.

        Raises:
            RuntimeError: there is none.
        """

    @abc.abstractmethod
    def blocks(
        self, reader: BlockReader, size: int, tell: Arrivals, pages: HugePages
    ) -> Iterator[Block]:
        """Yield the blocks that read it, once, in file order.

        Args:
            reader: what is to read them.
            size: bytes of a block.
            tell: is told of what comes.
            pages: for new memory.
        """

    @abc.abstractmethod
    def take(self, record: RecordEntry) -> torch.UntypedStorage | None:
        """Return a record's storage, the caller's from here on, once all has come.

        None: the record's local header is not where it should be, or not as it should be.
        """


class Scattered(Unit):
    """Neighbours, or one large record, each read into a storage of its own."""

    __slots__ = ("_heads", "_storages")

    def __init__(self, records: Sequence[RecordEntry], order: int, offset: int, length: int):
        super().__init__(records, order, offset, length)
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._heads: dict[str, memoryview] = {}

    def allocate(self) -> None:
        self._storages = {record.name: new_storage(record.size) for record in self.records}
        self.provided = True

    def blocks(
        self, reader: BlockReader, size: int, tell: Arrivals, pages: HugePages
    ) -> Iterator[Block]:
        ranges = [(storage.data_ptr(), storage.nbytes()) for storage in self._storages.values()]
        prepare: Callable[[], None] | None = partial(pages.advise_all, ranges)
        pieces: list[memoryview] = []
        seen: list[tuple[RecordEntry, int, memoryview]] = []
        begin, at, stop = self.offset, self.offset, self.offset + self.length
        for record, start, view in self._segments():
            done = 0
            while done < len(view):
                part = view[done : done + size - at % size]
                pieces.append(part)
                if start >= 0:
                    seen.append((record, start + done, part))
                done += len(part)
                at += len(part)
                if not at % size or at == stop:
                    yield self._block(begin, at, pieces, seen, tell, prepare)
                    begin, pieces, seen, prepare = at, [], [], None

    def _segments(self) -> Iterator[tuple[RecordEntry, int, memoryview]]:
        """Yield what lies in the range one after the other, and where it goes.

        That is a record's data, with 0; or what is before it, with -1.
        """
        at = self.offset
        between = memoryview(bytearray(self.length - self.nbytes))
        used = 0
        for record in self.records:
            head, used = (
                between[used : used + record.data_offset - at],
                used + record.data_offset - at,
            )
            self._heads[record.name] = head[record.header_offset - at :]
            yield record, -1, head
            address = self._storages[record.name].data_ptr()
            yield record, 0, host_buffer(address, record.size).view
            at = record.data_end

    def _block(
        self,
        begin: int,
        end: int,
        pieces: list[memoryview],
        seen: list[tuple[RecordEntry, int, memoryview]],
        tell: Arrivals,
        prepare: Callable[[], None] | None,
    ) -> Block:
        def deliver(_: memoryview, __: int) -> None:
            for record, start, view in seen:
                tell.see(record, start, view)
            tell.note(self, end - begin)

        return Block(begin, end - begin, deliver, direct=False, pieces=pieces, prepare=prepare)

    def take(self, record: RecordEntry) -> torch.UntypedStorage | None:
        storage = self._storages.pop(record.name)
        return (
            host_part(storage, 0, record.size)
            if is_header(self._heads.pop(record.name), record)
            else None
        )


class AsItLies(Unit):
    """One record, with what is before and after it in an aligned range of the file."""

    __slots__ = ("_alignment", "_base", "_memory")

    def __init__(
        self,
        records: Sequence[RecordEntry],
        order: int,
        offset: int,
        length: int,
        alignment: int,
    ) -> None:
        super().__init__(records, order, offset, length)
        self._alignment = alignment
        self._memory: torch.UntypedStorage | None = None
        self._base = 0  # address of the range's first byte

    def allocate(self) -> None:
        self._memory = new_storage(self.length + self._alignment)
        start = self._memory.data_ptr()
        self._base = start + -start % self._alignment
        self.provided = True

    def blocks(
        self, reader: BlockReader, size: int, tell: Arrivals, pages: HugePages
    ) -> Iterator[Block]:
        straight = reader.takes_any_memory
        direct = reader.goes_direct(self.offset, self.length)
        prepare: Callable[[], None] | None = partial(pages.advise, self._base, self.length)
        whole = host_buffer(self._base, self.length).view
        size *= STRAIGHT_BLOCKS if straight else 1
        at, stop = self.offset, self.offset + self.length
        while at < stop:
            end = min(stop, at - at % size + size)
            first = at - self.offset
            part = None
            if straight:
                part = Buffer(-1, whole[first : end - self.offset], self._base + first)
            deliver = partial(self._arrive, tell, first)
            yield Block(at, end - at, deliver, part, direct=direct, prepare=prepare)
            at, prepare = end, None

    def _arrive(self, tell: Arrivals, first: int, view: memoryview, address: int) -> None:
        """Deliver a block: `view` is the range's bytes from `first` on."""
        if address != self._base + first:
            memmove(self._base + first, address, len(view))
        (record,) = self.records
        at = self.offset + first
        begin, end = max(record.data_offset, at), min(record.data_end, at + len(view))
        if begin < end:
            tell.see(record, begin - record.data_offset, view[begin - at : end - at])
        tell.note(self, len(view))

    def take(self, record: RecordEntry) -> torch.UntypedStorage | None:
        memory, self._memory = cast("torch.UntypedStorage", self._memory), None
        head = self._base + record.header_offset - self.offset
        size = record.data_offset - record.header_offset
        with host_buffer(head, size).view as view:
            if not is_header(view, record):
                return None
        at = head + size
        if at % _ALIGNMENT:  # a file with another alignment of storages than torch's
            copy = new_storage(record.size)
            memmove(copy.data_ptr(), at, record.size)
            return host_part(copy, 0, record.size)
        return host_part(memory, at - memory.data_ptr(), record.size)


class CopiedOut(Unit):
    """Small neighbours that come to a staging buffer in one block."""

    __slots__ = ("_found", "_storages")

    def __init__(self, records: Sequence[RecordEntry], order: int, offset: int, length: int):
        super().__init__(records, order, offset, length)
        self._storages: list[torch.UntypedStorage] = []
        self._found: dict[str, torch.UntypedStorage | None] = {}

    def allocate(self) -> None:
        self._storages = [new_storage(record.size) for record in self.records]
        self.provided = True

    def blocks(
        self, reader: BlockReader, size: int, tell: Arrivals, pages: HugePages
    ) -> Iterator[Block]:
        yield Block(self.offset, self.length, partial(self._spread, tell))

    def _spread(self, tell: Arrivals, view: memoryview, address: int) -> None:
        storages, self._storages = self._storages, []
        for record, storage in zip(self.records, storages, strict=True):
            head = record.header_offset - self.offset
            at = record.data_offset - self.offset
            if not is_header(view[head:at], record):
                self._found[record.name] = None
                continue
            tell.see(record, 0, view[at : at + record.size])
            memmove(storage.data_ptr(), address + at, record.size)
            self._found[record.name] = host_part(storage, 0, record.size)
        tell.note(self, self.length)

    def take(self, record: RecordEntry) -> torch.UntypedStorage | None:
        return self._found.pop(record.name)


def is_header(view: memoryview, record: RecordEntry) -> bool:
    """Tell whether these bytes, from which on a record's data follows, are its local header."""
    if len(view) < LOCAL.size:
        return False
    signature, name_length, extra_length = LOCAL_LENGTHS.unpack_from(view, 0)
    stop = LOCAL.size + name_length
    return (
        signature == LOCAL_SIGNATURE
        and stop + extra_length == len(view)
        and view[LOCAL.size : stop] == record.full_name
    )


def host_part(storage: torch.UntypedStorage, start: int, nbytes: int) -> torch.UntypedStorage:
    """Return part of a storage: like what torch reads from a zip, it cannot be resized."""
    return cast("torch.UntypedStorage", storage[start : start + nbytes])
