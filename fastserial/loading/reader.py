"""FastFileReader: extents of a file into memory, in batched asynchronous reads.

Reads become blocks here: they are cut at multiples of a range size, and neighbouring reads within
such a range are joined: two limits, as in pyarrow's `CacheOptions` (range size, hole size). The
pump's policy decides how a range is read:

- Through the page cache, one call reads the parts of a range into their final memory.
- Direct I/O moves aligned blocks only. Bytes with the same offset in memory as in the file, modulo
  the alignment, are read in place; others arrive in a staging buffer and are copied.
- Bytes for a device pass through a staging buffer, or take the device path.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol, cast

from fastserial.checksums import CrcLedger, crc32
from fastserial.config import Config, current
from fastserial.config.performance import IN_PLACE, MOST_PIECES, NEAR_EXTENTS, UNSTAGED
from fastserial.errors import CorruptCheckpointError
from fastserial.files import linux
from fastserial.files.sources import FileStamp, file_name, stamp
from fastserial.formats.source import naming, read_to
from fastserial.interrupts import Descriptors, finish, finish_after, ours
from fastserial.loading.pump import Block, Pump, ReadCounts, Target
from fastserial.memory.buffers import Buffer, host_buffer, own_buffer
from fastserial.memory.storages import HostMemory, is_on_host, memmove, synchronize
from fastserial.progress import ProgressBar
from fastserial.reports import HOST_ONLY, LoadReport, Transfer, publish_load, warn_unmet

if TYPE_CHECKING:
    import torch

    from fastserial.memory.buffers import Ring


class Sink(Protocol):
    """Receives the bytes of one extent, in pieces, in any order, on any thread."""

    def deliver(self, view: memoryview, address: int, start: int) -> None:
        """Receive `view`, at host address `address`: the extent's bytes from `start` on."""

    def memory_for(self, start: int, length: int) -> Buffer | None:
        """Return host memory that these bytes may be read into before they are delivered.

        They may begin before the extent and end after it, if the sink has memory there.
        """


class ReadExtent(NamedTuple):
    """`length` bytes at `offset` of a file; `sink` takes them as its bytes from `start` on."""

    offset: int
    length: int
    sink: Sink
    start: int = 0

    @property
    def end(self) -> int:
        """First byte of the file after it."""
        return self.offset + self.length

    def part(self, first: int, stop: int) -> ReadExtent:
        """Return the part in range [first, stop) of the file."""
        return ReadExtent(first, stop - first, self.sink, self.start + first - self.offset)


class HostSink(HostMemory):
    """Host memory that receives the bytes of an extent.

    The `spare` bytes before and after it may be written, too: direct reads move whole blocks.
    """

    __slots__ = ("_spare",)

    def __init__(self, address: int, nbytes: int, owner: object, spare: int = 0) -> None:
        super().__init__(address, nbytes, owner)
        self._spare = spare

    def deliver(self, view: memoryview, address: int, start: int) -> None:
        if address != self.address + start:  # else it was read in place
            memmove(self.address + start, address, len(view))

    def memory_for(self, start: int, length: int) -> Buffer | None:
        if start < -self._spare or start + length > self.nbytes + self._spare:
            return None
        return host_buffer(self.address + start, length)


class DeviceSink:
    """Bytes of a tensor on a device, given as one-dimensional uint8.

    Bytes in a buffer of the ring are still being copied when `deliver` returns, until the ring has
    settled.
    """

    __slots__ = ("_bytes", "_ring")

    def __init__(self, flat: torch.Tensor, ring: Ring | None = None) -> None:
        self._bytes = flat
        self._ring = ring

    @property
    def device(self) -> torch.device:
        """Where the memory is."""
        return self._bytes.device

    def part(self, start: int, length: int) -> torch.Tensor:
        """Return the memory of some of the bytes."""
        return self._bytes[start : start + length]

    def deliver(self, view: memoryview, address: int, start: int) -> None:
        import torch

        target = self._bytes[start : start + len(view)]
        if self._ring is not None and self._ring.holds(address, len(view)):
            self._ring.send(address, len(view), target)
            return
        target.copy_(torch.frombuffer(view, dtype=torch.uint8))
        if self._bytes.device.type == "cuda":
            # the buffer is used again, and the caller's stream is not this thread's
            torch.cuda.current_stream(self._bytes.device).synchronize()

    def memory_for(self, start: int, length: int) -> Buffer | None:
        return None


def fill_each(extents: Iterable[ReadExtent], read_to: Callable[[memoryview, int], object]) -> None:
    """Read extents to the memory of `HostSink`s, one after the other.

    Args:
        read_to: fills memory from an offset of the file on.
    """
    for extent in extents:
        buffer = extent.sink.memory_for(extent.start, extent.length) if extent.length else None
        if buffer is not None:
            read_to(buffer.view, extent.offset)


class CheckedSink:
    """Passes the bytes of a record on, and adds their CRC-32 to a ledger.

    They begin at byte `first` of the record; if that is negative, with what lies before it. Without
    a sink only the ledger gets them.
    """

    __slots__ = ("_first", "_ledger", "_record", "_sink")

    def __init__(self, sink: Sink | None, ledger: CrcLedger, record: int, first: int = 0) -> None:
        self._sink = sink
        self._ledger = ledger
        self._record = record
        self._first = first

    def deliver(self, view: memoryview, address: int, start: int) -> None:
        at = self._first + start
        own = view[-at:] if at < 0 else view
        if len(own):
            self._ledger.add(self._record, max(0, at), len(own), crc32(own))
        if self._sink is not None:
            self._sink.deliver(view, address, start)

    def memory_for(self, start: int, length: int) -> Buffer | None:
        return None if self._sink is None else self._sink.memory_for(start, length)


def storage_sink(storage: torch.UntypedStorage, ring: Ring | None = None) -> Sink:
    """Return the sink that fills a storage, on the host or on a device (through the ring)."""
    if is_on_host(storage):
        return HostSink(storage.data_ptr(), storage.nbytes(), storage)
    import torch

    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return DeviceSink(flat, ring)


_UNWANTED = memoryview(bytearray(NEAR_EXTENTS))  # any thread writes here, nobody reads


def plan_blocks(reads: Iterable[ReadExtent], pump: Pump) -> Iterator[Block]:
    """Yield blocks that fetch the reads, about in the order of the file.

    Args:
        reads: in any order, all inside the file.
        pump: reads the blocks.
    """
    for run in _coalesced(sorted(reads, key=attrgetter("offset")), pump.range_size):
        first, stop = run[0].offset, _end(run)
        if (block := _on_device_path(run, pump)) is not None:
            yield block
        elif pump.policy.reads_directly(first, stop - first):
            yield from _direct(run, pump)
        else:
            yield from _cached(run, pump)


def _coalesced(parts: Iterable[ReadExtent], size: int) -> Iterator[list[ReadExtent]]:
    """Yield runs of parts that are read together, in the order of the file.

    Args:
        parts: in that order.
        size: bytes of the ranges of which no run spans two.
    """
    run: list[ReadExtent] = []
    number = end = 0
    for part in parts:
        at, last = part.offset, part.offset + part.length
        while at < last:
            if run and (at // size != number or at - end > NEAR_EXTENTS):
                yield run
                run = []
            if not run:
                number, end = at // size, at
            stop = min(last, number * size + size)
            run.append(part if stop - at == part.length else part.part(at, stop))
            end = max(end, stop)
            at = stop
    if run:
        yield run


def _end(run: Sequence[ReadExtent]) -> int:
    return max(part.end for part in run)


# -- the device path -------------------------------------------------------------------------------


def _on_device_path(run: Sequence[ReadExtent], pump: Pump) -> Block | None:
    """Return the block that is read to a device without the host, None if it is not."""
    part, sink = run[0], run[0].sink
    if len(run) > 1 or not isinstance(sink, DeviceSink):
        return None
    if not pump.policy.takes_device_path(sink.device, part.offset, part.length):
        return None
    return _block(run, part.offset, part.end, sink.part(part.start, part.length))


# -- directly --------------------------------------------------------------------------------------


def _direct(run: Sequence[ReadExtent], pump: Pump) -> Iterator[Block]:
    alignment = pump.policy.alignment
    rest: list[ReadExtent] = []
    for part in run:
        found = _aligned(part, alignment, pump.size) if pump.takes_any_memory else None
        if found is None:
            rest.append(part)
            continue
        at, memory = found
        inner = part.part(max(part.offset, at.offset), min(part.end, at.end))
        yield _block([inner], at.offset, at.end, memory, direct=True)
        edges = part.part(part.offset, inner.offset), part.part(inner.end, part.end)
        rest += [edge for edge in edges if edge.length]
    rest.sort(key=attrgetter("offset"))  # overlapping reads may put an edge out of order
    for near in _coalesced(rest, pump.block_size):
        start = near[0].offset - near[0].offset % alignment
        end = _end(near)
        yield _block(near, start, min(pump.size, end + -end % alignment), direct=True)


def _aligned(part: ReadExtent, alignment: int, size: int) -> tuple[ReadExtent, Buffer] | None:
    """Return what direct I/O can read to a part's memory; None: nothing, or too little.

    That is the whole part, with the bytes around it if there is memory for them, or its inside.
    """
    first, end = part.offset, part.end
    inner = first + -first % alignment, end - end % alignment
    outer = first - first % alignment, min(size, end + -end % alignment)
    for start, stop in (outer, inner):
        if stop - start < IN_PLACE:
            continue
        aligned = part.part(start, stop)
        memory = aligned.sink.memory_for(aligned.start, aligned.length)
        if memory is not None and not memory.address % alignment:
            return aligned, memory
    return None


# -- through the page cache ------------------------------------------------------------------------


def _cached(run: Sequence[ReadExtent], pump: Pump) -> Iterator[Block]:
    targets = ((part, _memory_for(part, pump)) for part in run)
    for staged, group in groupby(targets, key=lambda one: one[1] is None):
        if not staged:
            yield from _scattered(cast("Iterator[tuple[ReadExtent, Buffer]]", group))
            continue
        for near in _coalesced((part for part, _ in group), pump.block_size):
            yield _block(near, near[0].offset, _end(near))


def _memory_for(part: ReadExtent, pump: Pump) -> Buffer | None:
    """Return the memory to read a part into; None: it shares a staging buffer with others."""
    large = part.length >= UNSTAGED
    if not pump.takes_any_memory or (pump.ring is not None and not large):
        return None
    memory = part.sink.memory_for(part.start, part.length)
    return own_buffer(part.length) if memory is None and not large else memory


def _scattered(targets: Iterable[tuple[ReadExtent, Buffer]]) -> Iterator[Block]:
    """Yield blocks; each reads neighbouring parts with one call, into the memory of each."""
    parts: list[ReadExtent] = []
    buffers: list[Buffer] = []
    views: list[memoryview] = []
    end = 0

    def block() -> Block:
        deliver = partial(_deliver_scattered, parts, buffers)
        return Block(parts[0].offset, end - parts[0].offset, deliver, views)

    for part, buffer in targets:
        hole = part.offset - end
        if parts and (not 0 <= hole <= NEAR_EXTENTS or len(views) + 2 > MOST_PIECES):
            yield block()
            parts, buffers, views = [], [], []
        if parts and hole:
            views.append(_UNWANTED[:hole])
        views.append(buffer.view)
        parts.append(part)
        buffers.append(buffer)
        end = part.end
    yield block()


# -- delivery --------------------------------------------------------------------------------------


def _block(
    parts: Sequence[ReadExtent], start: int, stop: int, target: Target = None, direct: bool = False
) -> Block:
    return Block(start, stop - start, partial(_deliver, parts, start), target, direct)


def _deliver(parts: Sequence[ReadExtent], begin: int, view: memoryview, address: int) -> None:
    """Deliver a block, which begins at byte `begin` of the file, to the sinks of its parts."""
    for offset, length, sink, start in parts:
        at = offset - begin
        sink.deliver(view[at : at + length], address + at, start)


def _deliver_scattered(
    parts: Sequence[ReadExtent], buffers: Sequence[Buffer], _: memoryview, __: int
) -> None:
    """Deliver a scattered block: each sink gets the bytes that arrived in its memory."""
    for part, buffer in zip(parts, buffers, strict=True):
        part.sink.deliver(buffer.view, buffer.address, part.start)


class FastFileReader:
    """A regular file, open for reading at any offset.

    Bytes in the page cache are read through it, others with direct I/O, in blocks of `block_size`,
    `queue_depth` of them at once. For use by one thread at a time.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | BinaryIO | int,
        config: Config | None = None,
        name: str | None = None,
    ) -> None:
        """Open a file.

        Args:
            source: a path, or an open file or descriptor, which stays the caller's.
            config: options; by default those in force (`install`, `options`, environment).
            name: what to call it in errors and reports; by default its path.

        Raises:
            OSError: it cannot be opened, or is no regular file.
            EngineUnavailableError: the configured engine cannot read here.
        """
        self._closed = True  # until there is something to close
        self.config = config if config is not None else current()
        self._files = Descriptors()
        self.name, self.fd = _open(source, name, self._files)
        self._closed = False
        try:
            self.stamp = _stamp_of_file(self.fd, self.name)
            self.size = self.stamp.size
            self._bar = ProgressBar(self.name) if self.config.progress else None
            shown = self._bar.update if self._bar is not None else None
            self.blocks = Pump(self.fd, self.size, self.config, shown, self._files)
        except BaseException:
            self._closed = True
            self._files.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether the reader was closed."""
        return self._closed

    @property
    def transfer(self) -> Transfer:
        """The transfer type that was used for devices, and why."""
        return self.blocks.policy.transfer

    @property
    def ring(self) -> Ring | None:
        """The staging buffers of bytes for devices, after `attend`."""
        return self.blocks.ring

    def attend(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Prepare to fill storages, some of which may be on devices.

        They are filled after what the calling thread's current streams hold now.
        """
        away = [storage for storage in storages if not is_on_host(storage)]
        if not away:
            return
        from fastserial.memory.buffers import open_ring  # not without a device

        synchronize(away)  # for what does not pass through the ring
        devices = {storage.device for storage in away}
        blocks = self.blocks
        if blocks.ring is not None:
            blocks.join(devices)
            return
        ring, taken = open_ring(self.config, devices, blocks.takes_any_memory)
        blocks.stage_in(ring, devices, taken)

    def expect(self, first: int, stop: int, nbytes: int) -> None:
        """Prepare for reading `nbytes` bytes of range [first, stop) in the order of the file."""
        if self._bar is not None:
            self._bar.expect(nbytes)
        self.blocks.expect(first, stop, nbytes)

    def read_into(self, extents: Sequence[ReadExtent]) -> None:
        """Read extents, in the order of the file; returns when all have arrived.

        Raises once no read is in progress. After a failed read the reader reads no more.

        Raises:
            CorruptCheckpointError: an extent ends after the file does, or the file changed.
            OSError: the disk failed; `filename` names the file.
        """
        if self._closed:
            raise ValueError("I/O operation on closed file.")
        extents = [extent for extent in extents if extent.length]  # an empty one may lie anywhere
        for extent in extents:
            if extent.offset < 0 or extent.length < 0 or extent.offset + extent.length > self.size:
                raise CorruptCheckpointError(
                    f"{extent.length} bytes at {extent.offset} go past the end of the file "
                    f"({self.size} bytes)",
                    path=self.name,
                    offset=extent.offset,
                )
        with translated(self.name):
            if extents:
                self._read(extents)
            self.check_unchanged()

    def _read(self, extents: Sequence[ReadExtent]) -> None:
        blocks = self.blocks
        first = min(extent.offset for extent in extents)
        stop = max(extent.offset + extent.length for extent in extents)
        self.expect(first, stop, sum(extent.length for extent in extents))
        try:
            blocks.read(plan_blocks(extents, blocks))
            if self.ring is not None:
                self.ring.settle()
        except BaseException as error:
            # No read may be in progress into memory that others use from here on: torch, which
            # reads into the same storages instead, or their owner.
            finish_after(error, blocks.close)
            raise

    def check_unchanged(self) -> None:
        """Raise if the file was written to since it was opened.

        Raises:
            CorruptCheckpointError: its size is another, or its time of modification and its ends.
        """
        _refuse_changed(self.stamp, self.fd, self.name)

    def close(self) -> None:
        """Close the file, waiting only for reads in progress. Idempotent."""
        if self._closed:
            return
        self._closed = True
        finish(self.blocks.close, *([self._bar.close] if self._bar is not None else []))
        self._files = Descriptors()  # closed after the last read from it

    def __enter__(self) -> FastFileReader:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        finish_after(error, self.close)


class OccasionalReader:
    """A regular file that is read occasionally: between reads only its descriptor is kept.

    Calls are independent: threads, signal handlers and forked children may read at the same time.
    Few bytes are read by the caller's thread, more by a `FastFileReader` that ends with the call.

    Attributes:
        name: its path.
        fd: its descriptor.
        stamp: its state when it was opened.
    """

    def __init__(self, path: str | os.PathLike[str], config: Config | None = None) -> None:
        """Open a file.

        Args:
            path: its path.
            config: options; by default those in force.

        Raises:
            OSError: it cannot be opened, or is no regular file.
        """
        self.name = os.fspath(path)
        self._config = config if config is not None else current()
        self._files: Descriptors | None = Descriptors()
        self.fd = self._files.open(self.name, os.O_RDONLY | os.O_NONBLOCK)  # a pipe is refused
        try:
            self.stamp = _stamp_of_file(self.fd, self.name)
        except BaseException:
            self._files.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._files is None

    def read_into(self, extents: Sequence[ReadExtent]) -> None:
        """Read extents; returns when all have arrived.

        Raises:
            CorruptCheckpointError: the file changed since it was opened.
            OSError: the disk failed; `filename` names the file.
            ValueError: it is closed.
        """
        files = self._files  # stays open up to the end of this call
        if files is None:
            raise ValueError("I/O operation on closed file.")
        nbytes = sum(extent.length for extent in extents)
        if nbytes <= self._config.small_file and all(
            isinstance(extent.sink, HostSink) for extent in extents
        ):
            with translated(self.name):
                fill_each(extents, lambda view, offset: read_to(view, self.fd, offset))
        else:
            with FastFileReader(self.fd, self._config, self.name) as reader:
                reader.read_into(extents)
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raise if the file was written to since it was opened.

        Raises:
            CorruptCheckpointError: its size is another, or its time of modification and its ends.
        """
        _refuse_changed(self.stamp, self.fd, self.name)

    def close(self) -> None:
        """Close the file, once reads in progress in other threads are done. Idempotent."""
        self._files = None


def _stamp_of_file(fd: int, name: str) -> FileStamp:
    """Return what identifies the present state of an open file.

    Raises:
        OSError: it is no regular file.
    """
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", name)
    return stamp(fd, found)


def _refuse_changed(before: FileStamp, fd: int, name: str) -> None:
    if not before.holds_for(fd):
        raise CorruptCheckpointError("the file changed while it was read", path=name)


@contextlib.contextmanager
def translated(name: str) -> Iterator[None]:
    """Give errors of the body the file's name."""
    try:
        with naming(name):
            yield
    except ours(OSError) as error:
        if error.filename is not None:
            raise
        number = error.errno or errno.EIO
        raise OSError(number, error.strerror or str(error), name) from error


def _open(
    source: str | os.PathLike[str] | BinaryIO | int, name: str | None, files: Descriptors
) -> tuple[str, int]:
    """Return the name and a new descriptor of the file."""
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        return name or path, files.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe is refused
    fd = source if isinstance(source, int) else source.fileno()
    text = name or file_name(source, fd)
    try:
        return text, linux.reopen(fd, os.O_RDONLY, files)
    except ours(
        OSError
    ):  # without /proc, or after privileges were dropped: positions are never used
        return text, files.duplicate(fd)


def report_load(
    counts: ReadCounts, config: Config, transfer: Transfer = HOST_ONLY, **rest: Any
) -> None:
    """Publish the report of a load.

    Args:
        counts: what was read.
        config: the options that it was read with.
        transfer: the transfer type that was used for devices.
        rest: the other fields of `LoadReport`.
    """
    from fastserial.memory.buffers import on_host  # rarely needed, and not at the start

    if transfer == HOST_ONLY:
        transfer = on_host(config)
    fallback = rest.get("fallback")
    if config.direct is True and not counts.direct and fallback is not None:
        warn_unmet("direct=True", fallback)
    report = LoadReport(
        bytes=counts.direct + counts.cached,
        direct_bytes=counts.direct,
        cached_bytes=counts.cached,
        transfer=transfer.word,
        transfer_why=transfer.why,
        **rest,
    )
    publish_load(report, config.on_load)
