"""From parts of a layout to blocks to an engine, `queue_depth` blocks at a time.

A block is at most `block_size` bytes and ends at a multiple of `block_size` in the file. It is
filled from the parts it covers and written directly where its ends are aligned (FastPersist's
double buffering: one block is filled while others are written). What is not aligned, the first and
the last page of a range, goes through the page cache; no page is written both ways.

Beside a thread that keeps the interpreter busy, one block of as much memory does (`crowding`).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from fastserial import trace
from fastserial.checksums import CrcLedger
from fastserial.config import MAX_BLOCK, Config
from fastserial.config.performance import FILL_CHUNK, PAGE
from fastserial.engines import Completion, Engine, Op, Request, create
from fastserial.engines.threads import ThreadsEngine
from fastserial.errors import EngineError
from fastserial.files import linux
from fastserial.files.caching import CachedWrites, cached_writes
from fastserial.files.linux import Compression, open_direct
from fastserial.formats.extents import Hole
from fastserial.interrupts import Descriptors, finish
from fastserial.memory.buffers import BufferPool
from fastserial.reports import Transfer
from fastserial.saving.buffered import write_all, write_buffered
from fastserial.saving.crowding import Crowding
from fastserial.saving.device_blocks import DeviceBlocks
from fastserial.saving.fill import Block, Part, held, is_borrowed, prepare
from fastserial.saving.tally import Tally

if TYPE_CHECKING:
    import torch

__all__ = ["BlockWriter"]

_log = logging.getLogger("fastserial")
_SCARCE = (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)


class BlockWriter:
    """Writes parts to one file. Parts that follow each other in the file share blocks.

    Raises the `OSError` of the first write that failed; then only `close` may follow.
    """

    def __init__(
        self,
        fd: int,
        config: Config,
        *,
        tally: Tally | None = None,
        on_progress: Callable[[int], None] | None = None,
        expected: int | None = None,
        may_be_locked: bool = False,
        compression: Compression | None = None,
        owner: object = None,
    ) -> None:
        """Write to descriptor `fd`, which stays the caller's.

        Args:
            tally: counts the bytes.
            on_progress: called with the bytes of each part that is written.
            expected: bytes there will be, if known: what a short file does not use is not started.
            may_be_locked: others know the file and may hold a `lockf` lock on it.
            compression: how the file system compresses the file.
            owner: kept as long as the descriptor is written to.
        """
        self.direct = False
        self.fallback: str | None = None
        self.submit_seconds: list[float] = []
        self.complete_seconds: list[float] = []
        self.tally = tally if tally is not None else Tally()
        self._fd = fd
        self._config = config
        self._expected = expected
        self._on_progress = on_progress
        self._may_be_locked = may_be_locked
        self._compression = compression
        self._owner = owner
        self._files = Descriptors()
        self._engineless = False
        self._direct_fd = -1
        self._cached: CachedWrites | None = None  # blocks go through the page cache
        self._align = PAGE
        self._engine: Engine | None = None
        self._pool: BufferPool | None = None
        self._devices = DeviceBlocks(config)
        self._crowding = Crowding()
        self._chunk = FILL_CHUNK
        # No thread helps: each hand-over would wait for the interpreter's lock.
        self._alone: ThreadsEngine | None = None
        self._batch: list[Request] = []
        self._in_flight = 0
        self._done: list[Completion] = []  # by this thread
        self._parts: list[Part] = []  # of the block that is not full yet,
        self._end = 0  # which ends here so far
        self._ledgers: set[CrcLedger] = set()

    @property
    def engine_name(self) -> str:
        """The engine in use, or `buffered` as long as there was no need for one."""
        return self._engine.name if self._engine is not None else "buffered"

    @property
    def transfer(self) -> Transfer:
        """The transfer type taken for parts from devices, and why."""
        return self._devices.transfer

    def join(self, places: Collection[torch.device]) -> None:
        """Get ready for parts from devices, as they are after what is queued there now."""
        self._devices.join(places, self._pool is not None)

    def put(self, part: Part) -> None:
        """Take a part. Blocks that are full are queued."""
        offset, source, start, rest, ledger = part
        if ledger is not None:
            self._ledgers.add(ledger)
        if self._parts and offset != self._end:
            self._dispatch()
        while rest:
            length = min(rest, self._room(offset))
            self._parts.append(Part(offset, source, start, length, ledger))
            offset += length
            self._end = offset
            start += length
            rest -= length
            if not self._room(offset):
                self._dispatch()
                if self._crowding.found():
                    self._go_alone()

    def _room(self, offset: int) -> int:
        """Return how many bytes the open block still takes at `offset`.

        A range that begins within a page begins with a block of the rest of that page.
        """
        begin = self._parts[0].offset if self._parts else offset
        if begin % PAGE:
            end = begin + -begin % PAGE
        else:
            size = self._config.block_size
            end = begin - begin % size + size
        return end - offset

    def start(self) -> None:
        """Let the engine begin with the blocks that are full."""
        self._submit()

    def release_sources(self) -> None:
        """Wait until no memory put so far is needed any more, but for `bytes` objects."""
        self._drain()
        parts, self._parts = self._parts, []
        for part in parts:
            self._parts.extend(held(part) if is_borrowed(part) else [part])

    def finish(self) -> None:
        """Write what is left and wait for everything."""
        if self._parts:
            self._dispatch()
        self._drain()
        if self._cached is not None:
            self._cached.conclude()

    @trace.traced("stop engine")
    def close(self) -> None:
        """Stop the engine and free the buffers, waiting only for writes under way. Idempotent."""
        finish(self._stop, self._devices.close, self._free)

    def _stop(self) -> None:
        for ledger in self._ledgers:
            ledger.fail()  # if the save failed, a thread may wait for what will not come
        if self._engine is not None:
            self._engine.close()

    def _free(self) -> None:
        self._crowding.end()
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        self._direct_fd = -1
        self._files.close()
        self._parts = []
        self._batch = []

    @trace.traced("write tail (page cache)")
    def _write_cached(self, view: memoryview, offset: int) -> None:
        self.tally.plain += len(view)
        write_all(self._fd, [view], offset)

    def _dispatch(self) -> None:
        """Queue the block that is complete, or the last one."""
        parts, self._parts = self._parts, []
        length = sum(part.length for part in parts)
        if all(type(part.source) is Hole for part in parts):
            self.tally.skipped += length
            self._advance(length)
            return
        if length > self._config.block_size:  # copies have no bounds of their own
            raise EngineError(f"{length} bytes do not fit a block of {self._config.block_size}")
        pool = self._pool or self._open()
        if pool is None:
            write_buffered(self._fd, parts)
            self.tally.add_plain(parts)
            self._advance(length)
            return
        while not pool.free:
            self._submit()
            self._reap()
        offset = parts[0].offset
        if self._cached is not None and self._cached.on_trial:
            self._trial(self._cached, offset, length)
        aligned = length - length % self._align
        direct = self.direct and aligned > 0 and offset % self._align == 0
        buffer = pool.take()
        move, shown = self._devices.fetch(parts, length, offset, buffer)
        files = self._owner, self._files
        self._batch.append(
            Request(
                Op.WRITE,
                self._direct_fd if direct else self._fd,
                offset,
                aligned if direct else length,
                buffer,
                prepare,
                Block(parts, length, files, self._chunk, self._devices.ring, shown),
                move=move,
            )
        )

    @trace.traced("start engine")
    def _open(self) -> BufferPool | None:
        """Start the engine; None: it has no memory, and blocks go through the page cache."""
        if self._engineless:
            return None
        config = self._config
        if self._expected is not None:
            blocks = max(1, -(-self._expected // config.block_size))
            if blocks < max(config.queue_depth, config.threads):
                depth, threads = min(blocks, config.queue_depth), min(blocks, config.threads)
                config = replace(config, queue_depth=depth, threads=threads)
        try:
            engine, pool = self._start_engine(config)
        except (MemoryError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _SCARCE:
                raise
            self._engineless = True
            self.fallback = f"through the page cache, block by block: {error}"
            return None
        if self._may_be_locked and linux.is_locked(self._fd):
            self.fallback = "the file is locked (lockf): opening it once more would end the lock"
        else:
            self._open_direct()
        refusal = None if self.direct else self.fallback or "direct I/O is switched off"
        self._devices.go_straight(engine, self._fd, refusal)
        if self.direct and not self._devices.straight and self._suits_cache(engine):
            synced = config.durable and not self._may_be_locked
            self._cached = cached_writes(self._fd, config, self._expected or 0, synced)
            self.direct = self._cached is None
        engine.open(pool.buffers, len(pool.buffers))
        return pool

    def _suits_cache(self, engine: Engine) -> bool:
        """Return whether an engine writes as well through the page cache."""
        return engine.capabilities.moves_data and engine.capabilities.any_memory

    def _trial(self, cached: CachedWrites, offset: int, length: int) -> None:
        """Switch to direct I/O, once enough is written, if that is faster."""
        if not cached.is_enough:
            cached.take(offset, length)
            return
        self._drain()
        if cached.judge():
            self._cached = None
            self.direct = True

    def _start_engine(self, config: Config) -> tuple[Engine, BufferPool]:
        """Make the engine and its buffers.

        Raises:
            EngineUnavailableError: it cannot run here.
        """
        engine = create(config.engine, config.threads)
        try:
            ring: BufferPool | None = self._devices.open_ring(engine)
            pool = ring or engine.allocate(config.queue_depth, config.block_size)
        except BaseException:
            engine.close()
            raise
        self._engine, self._pool = engine, pool
        return engine, pool

    def _go_alone(self) -> None:
        """Go on with one block instead of several, filled and written by this thread."""
        engine, pool = self._engine, self._pool
        devices = self._devices.ring is not None or self._devices.straight
        if not isinstance(engine, ThreadsEngine) or pool is None or devices:
            return
        self._drain()
        size = min(MAX_BLOCK, sum(buffer.nbytes for buffer in pool.buffers))
        try:
            self._pool = BufferPool(1, size)
        except (MemoryError, OSError):
            return
        self._config = replace(self._config, block_size=size)
        self._chunk = size
        self._alone = engine
        self.fallback = (
            self.fallback or "another thread keeps the interpreter busy: blocks one by one"
        )
        pool.close()

    def _open_direct(self) -> None:
        if self._config.never_direct:
            return
        if self._compression is Compression.THROUGH_CACHE:
            self.fallback = "the file system compresses this file, but not direct writes"
            return
        synced = fcntl.fcntl(self._fd, fcntl.F_GETFL) & os.O_SYNC  # or O_DSYNC, part of it
        found = open_direct(self._fd, os.O_WRONLY | synced, self._config.block_size, self._files)
        self._direct_fd, self._align, self.fallback = found
        self.direct = found.refusal is None

    def _submit(self) -> None:
        if self._batch and self._engine is not None:
            batch, self._batch = self._batch, []
            self._in_flight += len(batch)
            with trace.step("submit"):
                if self._alone is not None:
                    self._done += map(self._alone.serve_here, batch)
                else:
                    self._engine.submit(batch)

    def _drain(self) -> None:
        self._submit()
        while self._in_flight:
            self._reap()

    def _reap(self) -> None:
        """Wait for at least one request and take back its buffer."""
        if self._engine is None or self._pool is None:
            return
        with trace.step("wait for blocks"):
            finished, self._done = self._done or self._engine.wait(1), []
        for completion in finished:
            self._in_flight -= 1
            request = completion.request
            if trace.listener is not None:
                trace.block(request.times)
            self._check(completion)
            block: Block = request.tag
            if request.length < block.length and self._engine.capabilities.moves_data:
                tail = request.buffer.view[request.length : block.length]
                self._write_cached(tail, request.offset + request.length)
            if self._cached is not None:
                self._cached.wrote(request.offset, request.length)
            self._pool.give(request.buffer)
            if block.length == self._config.block_size:
                self._crowding.saw(block)
            queued, started, done = request.times
            self.submit_seconds.append(started - queued)
            self.complete_seconds.append(done - started)
            self._advance(block.length)

    def _check(self, completion: Completion) -> None:
        request, error = completion.request, completion.error
        if error is None:
            if completion.transferred == request.length:
                self.tally.engine += request.length
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
