"""From extents to blocks to an engine: one pass over the file, in order.

A block is `block_size` bytes at a multiple of `block_size` in the file. It is filled from the
extents it covers (the checksum of a chunk is taken while the chunk is in cache, as FastPersist's
double buffering overlaps the copy of one block with the write of another) and written directly
where its ends are aligned. What is not aligned, the rest of the last page and the first block of
a caller's file, goes through the page cache; no page is written both ways.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import NamedTuple

from fastserial import filesystem, headroom
from fastserial.buffered import write_all, write_buffered
from fastserial.checksums import CrcLedger, crc32
from fastserial.config import Config
from fastserial.containers.extents import (
    Computed,
    Data,
    Hole,
    Literal,
    Packed,
    Sealed,
    Source,
)
from fastserial.engines import Completion, Engine, Op, Request, create
from fastserial.errors import EngineError, EngineUnavailableError
from fastserial.packing import fill_packed
from fastserial.readback import ReadBack
from fastserial.staging import BufferPool, HostMemory
from fastserial.statistics import TransferTally

__all__ = ["BlockWriter", "Part", "fill", "staged"]

_log = logging.getLogger("fastserial")
_PAGE = 4096
_CHUNK = 256 * 1024  # stays in a core's cache between copy and checksum; copies cost less CPU, too
_CRC = struct.Struct("<I")
_SCARCE = (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)


class Part(NamedTuple):
    """`length` bytes of a source, from its byte `start`."""

    source: Source
    start: int
    length: int
    ledger: CrcLedger | None


def fill(parts: list[Part], view: memoryview, address: int) -> None:
    """Put the bytes of the parts one behind the other at `address`, which `view` shows.

    What needs checksums comes last: it may wait for other threads to fill the blocks before.
    """
    at = 0
    late: list[tuple[int, Part]] = []
    for part in parts:
        source, start, length, ledger = part
        if isinstance(source, Data):
            _fill_data(source, part, view, address, at)
        elif isinstance(source, Packed):
            if length == source.length:
                fill_packed(source, ledger, view, address, at)
            else:
                view[at : at + length] = _packed_piece(source, ledger, start, length)
        elif isinstance(source, Literal):
            view[at : at + length] = source.data[start : start + length]
        elif isinstance(source, Hole):
            view[at : at + length] = bytes(length)
        else:
            late.append((at, part))
        at += length
    for at, (source, start, length, ledger) in late:
        if ledger is None:
            raise EngineError("a source that needs checksums came without a ledger")
        if isinstance(source, Sealed):
            text: bytes | bytearray = bytearray(source.data)
            _CRC.pack_into(text, source.at, ledger.wait(source.record))
        elif isinstance(source, Computed):
            text = source.data(ledger.wait_all())
        else:
            raise EngineError(f"no such source: {source!r}")
        view[at : at + length] = text[start : start + length]


def _fill_data(source: Data, part: Part, view: memoryview, address: int, at: int) -> None:
    _, start, length, ledger = part
    memory = source.memory
    wanted = source.record is not None and ledger is not None
    step = _CHUNK if wanted or isinstance(memory, HostMemory) else length
    crc = 0
    for done in range(0, length, step):
        size = min(step, length - done)
        memory.copy_to(address + at + done, start + done, size)
        if wanted:
            crc = crc32(view[at + done : at + done + size], crc)
    if source.record is not None and ledger is not None:
        ledger.add(source.record, start, length, crc)


def _packed_piece(source: Packed, ledger: CrcLedger | None, start: int, length: int) -> bytes:
    """Return a part of a packed source that the end of a block cuts."""
    with source.lock:
        if source.made is None:
            source.made = staged([Part(source, 0, source.length, ledger)])
        piece = bytes(source.made[start : start + length])
        source.used += length
        if source.used == source.length:
            source.made = None
    return piece


@dataclass(slots=True)
class _Block:
    """What fills a block, and how many bytes that is."""

    parts: list[Part]
    length: int
    fill_seconds: float = 0.0


class BlockWriter:
    """Writes a growing stream of extents to one file, `queue_depth` blocks at a time.

    Raises the `OSError` of the first write that failed; then only `close` may follow.
    """

    def __init__(
        self,
        fd: int,
        offset: int,
        config: Config,
        on_progress: Callable[[int], None] | None = None,
        may_be_locked: bool = False,
    ) -> None:
        """Write to descriptor `fd` from byte `offset` on; the descriptor stays the caller's.

        Args:
            may_be_locked: others know the file and may hold a `lockf` lock on it.
        """
        self.position = offset
        self.direct = False
        self.fallback: str | None = None
        self.submit_seconds: list[float] = []
        self.complete_seconds: list[float] = []
        self.tally = TransferTally()
        self._fd = fd
        self._start = offset
        self._config = config
        self._untuned: Config | None = None
        self._expected: int | None = None
        self._buffered = False  # as a whole, by `finish`
        self._on_progress = on_progress
        self._may_be_locked = may_be_locked
        self._engineless = False
        self._direct_fd = -1
        self._readback: ReadBack | None = None
        self._align = _PAGE
        self._engine: Engine | None = None
        self._pool: BufferPool | None = None
        self._batch: list[Request] = []
        self._in_flight = 0
        self._parts: list[Part] = []
        self._ledgers: set[CrcLedger] = set()

    @property
    def engine_name(self) -> str:
        """The engine in use, or `buffered` as long as there was no need for one."""
        return self._engine.name if self._engine is not None else "buffered"

    def reconfigure(self, config: Config) -> bool:
        """Go over to other options, with the engine so far in reserve.

        Returns False where it is too late: something was put already.
        """
        if self._engine is not None or self._parts:
            return False
        self._untuned = self._config
        self._config = config
        return True

    def put(self, source: Source, ledger: CrcLedger | None = None) -> None:
        """Append a source. Blocks that are full are queued."""
        if ledger is not None:
            self._ledgers.add(ledger)
        if self._buffered:
            if self.position - self._start + source.length <= self._config.small_file:
                self._parts.append(Part(source, 0, source.length, ledger))
                self.position += source.length
                return
            self._go_over_to_blocks()
        size = self._config.block_size
        start, rest = 0, source.length
        while rest:
            room = size - self.position % size
            length = min(rest, room)
            self._parts.append(Part(source, start, length, ledger))
            self.position += length
            start += length
            rest -= length
            if length == room:
                self._dispatch()

    def expect(self, nbytes: int) -> None:
        """Tell how many bytes there will be, as far as known: a small file needs no engine."""
        self._expected = nbytes
        if self._engine is None:
            whole = sum(part.length for part in self._parts) == self.position - self._start
            buffered = whole and self.is_small(nbytes)
            if self._buffered and not buffered:
                self._go_over_to_blocks()
            self._buffered = buffered

    def is_small(self, nbytes: int) -> bool:
        """Return whether a file of so many bytes needs no engine."""
        return nbytes <= self._config.small_file and self._config.direct is not True

    def write_only(self, data: bytearray) -> bool:
        """Write all there will be in one call; False if it is not the first, or not that little."""
        if not data or self.position != self._start or not self.is_small(len(data)):
            return False
        self._write_cached(memoryview(data), self.position)
        self.position += len(data)
        self._advance(len(data))
        return True

    def _go_over_to_blocks(self) -> None:
        """Cut what was put into blocks after all: the file is not that small."""
        self._buffered = False
        parts, self._parts = self._parts, []
        self.position -= sum(part.length for part in parts)
        for part in parts:
            self.put(part.source, part.ledger)

    def settle(self) -> None:
        """Wait until no memory put so far is needed any more, but for `bytes` objects."""
        self._drain()
        if not any(_is_borrowed(part.source) for part in self._parts):
            return
        if self._buffered:
            self._write_buffered()
        else:
            held = bytes(staged(self._parts))
            self._parts = [Part(Literal(held), 0, len(held), None)]

    def finish(self) -> None:
        """Write what is left and wait for everything."""
        if self._parts:
            if self._engine is None and self.is_small(self.position - self._start):
                self._write_buffered()
            else:
                self._dispatch()
        self._drain()

    def close(self) -> None:
        """Stop the engine and free the buffers, waiting only for writes under way. Idempotent."""
        for ledger in self._ledgers:
            ledger.fail()  # if the save failed, a thread may wait for what will not come
        if self._engine is not None:
            self._engine.close()
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        fd, self._direct_fd = self._direct_fd, -1  # first: an interrupt must not close it twice
        if fd >= 0:
            os.close(fd)
        if self._readback is not None:
            self._readback.close()
            self._readback = None
        self._parts = []
        self._batch = []

    def _write_buffered(self) -> None:
        """Write what there is through the page cache, without an engine."""
        parts, self._parts = self._parts, []
        length = sum(part.length for part in parts)
        began = perf_counter()
        self.tally.cached_bytes += length
        write_buffered(self._fd, parts, self.position - length, staged)
        self.tally.cached_seconds += perf_counter() - began
        self._advance(length)

    def _write_cached(self, view: memoryview, offset: int) -> None:
        began = perf_counter()
        self.tally.cached_bytes += len(view)
        write_all(self._fd, [view], offset)
        self.tally.cached_seconds += perf_counter() - began

    def _dispatch(self) -> None:
        """Queue the block that is complete, or the last one."""
        parts, self._parts = self._parts, []
        length = sum(part.length for part in parts)
        if all(type(part.source) is Hole for part in parts):
            self._advance(length)
            return
        if length > self._config.block_size:  # copies have no bounds of their own
            raise EngineError(f"{length} bytes do not fit a block of {self._config.block_size}")
        pool = self._pool or self._open()
        if pool is None:
            self._parts = parts
            self._write_buffered()
            return
        while not pool.free:
            self._submit()
            self._reap()
        offset = self.position - length
        aligned = length - length % self._align
        direct = self.direct and aligned > 0 and offset % self._align == 0
        self._batch.append(
            Request(
                Op.WRITE,
                self._direct_fd if direct else self._fd,
                offset,
                aligned if direct else length,
                pool.take(),
                _prepare,
                _Block(parts, length),
            )
        )

    def _open(self) -> BufferPool | None:
        """Start the engine; None: there is no memory for it, and blocks go as a small file does."""
        if self._engineless:
            return None
        config, untuned = headroom.fitted(self._config), self._untuned
        if self._expected is not None:  # what a short file does not use is not started
            blocks = max(1, -(-self._expected // config.block_size))
            if blocks < max(config.queue_depth, config.threads):
                depth, threads = min(blocks, config.queue_depth), min(blocks, config.threads)
                config = replace(config, queue_depth=depth, threads=threads)
        try:
            if not headroom.is_enough(config):
                raise MemoryError(headroom.REASON)
            try:
                engine, pool = self._start_engine(config)
            except EngineUnavailableError as error:
                if untuned is None or untuned.engine == config.engine:
                    raise
                _log.warning("%s; going on with engine %r", error, untuned.engine)
                config = replace(config, engine=untuned.engine, threads=untuned.threads)
                engine, pool = self._start_engine(config)
        except (MemoryError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _SCARCE:
                raise
            self._engineless = True
            self.fallback = f"through the page cache, block by block: {error}"
            return None
        locked = self._may_be_locked and filesystem.is_locked(self._fd)
        if locked:
            self.fallback = "the file is locked (lockf): opening it once more would end the lock"
        else:
            self._open_direct()
        if config.verify and engine.capabilities.moves_data and not locked:
            try:
                self._readback = ReadBack(self._fd, self.direct, config.block_size)
            except PermissionError:
                self.fallback = "not read back (verify): the file may be written, but not read"
        engine.open(pool.buffers, len(pool.buffers))
        return pool

    def _start_engine(self, config: Config) -> tuple[Engine, BufferPool]:
        """Make the engine and its buffers.

        Raises:
            EngineUnavailableError: it cannot run here.
        """
        engine = create(config.engine, config.threads)
        try:
            pool = engine.allocate(config.queue_depth, config.block_size)
        except BaseException:
            engine.close()
            raise
        self._engine, self._pool = engine, pool
        return engine, pool

    def _open_direct(self) -> None:
        if self._config.direct is False:
            return
        alignment = filesystem.direct_alignment(self._fd)
        if alignment is None:
            self.fallback = "the file system has no direct I/O for this file"
            return
        self._align = max(_PAGE, alignment.offset, alignment.memory)
        if self._config.block_size % self._align:
            self.fallback = f"block_size is not a multiple of the device's {self._align} bytes"
            return
        try:
            synced = fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_SYNC  # or O_DSYNC, part of it
            self._direct_fd = filesystem.reopen(self._fd, os.O_WRONLY | os.O_DIRECT | synced)
        except OSError as error:
            self.fallback = f"direct I/O refused: {error.strerror}"
            return
        self.direct = True

    def _submit(self) -> None:
        if self._batch and self._engine is not None:
            batch, self._batch = self._batch, []
            self._in_flight += len(batch)
            self._engine.submit(batch)

    def _drain(self) -> None:
        self._submit()
        while self._in_flight:
            self._reap()

    def _reap(self) -> None:
        """Wait for at least one request and take back its buffer."""
        if self._engine is None or self._pool is None:
            return
        for completion in self._engine.wait(1):
            self._in_flight -= 1
            request = completion.request
            self._check(completion)
            block: _Block = request.tag
            if request.length < block.length and self._engine.capabilities.moves_data:
                tail = request.buffer.view[request.length : block.length]
                self._write_cached(tail, request.offset + request.length)
            if self._readback is not None:
                self._readback.check(request, self.direct and request.fd == self._direct_fd)
            self._pool.give(request.buffer)
            self.tally.blocks += 1
            self.tally.fill_seconds += block.fill_seconds
            queued, started, done = request.times
            self.submit_seconds.append(started - queued)
            self.complete_seconds.append(done - started)
            self._advance(block.length)

    def _check(self, completion: Completion) -> None:
        request, error = completion.request, completion.error
        if error is None:
            if completion.transferred == request.length:
                if request.fd == self._direct_fd:
                    self.tally.direct_bytes += request.length
                return
            raise OSError(
                errno.EIO, f"only {completion.transferred} of {request.length} bytes were written"
            )
        refused = isinstance(error, OSError) and error.errno == errno.EINVAL
        if not refused or request.fd != self._direct_fd:
            raise error
        # The block is prepared; the file system takes it only through the page cache.
        self.direct = False
        self.fallback = "direct I/O refused at the first write: Invalid argument"
        _log.debug("%s; going on through the page cache", self.fallback)
        self._write_cached(request.view, request.offset)

    def _advance(self, length: int) -> None:
        if self._on_progress is not None:
            self._on_progress(length)


def _is_borrowed(source: Source) -> bool:
    if isinstance(source, Literal):
        return not isinstance(source.data, bytes)
    return isinstance(source, Data | Packed)


def _prepare(request: Request) -> None:
    """Fill a block's buffer. If that fails, nobody waits for its checksums for ever."""
    block: _Block = request.tag
    began = perf_counter()
    try:
        fill(block.parts, request.buffer.view, request.buffer.address)
        block.fill_seconds = perf_counter() - began
    except BaseException as error:
        for part in block.parts:
            if part.ledger is not None:
                part.ledger.fail(error)
        raise


def staged(parts: list[Part]) -> bytearray:
    """Return the bytes of the parts, for what does not go through the pool."""
    whole = bytearray(sum(part.length for part in parts))
    if whole:
        address = ctypes.addressof(ctypes.c_char.from_buffer(whole))
        fill(parts, memoryview(whole), address)
    return whole
