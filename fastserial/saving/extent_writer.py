"""Writes extents of a layout to a file: small files through the page cache, large ones in blocks.

A writer takes any extents of a layout, in any order, and any open file. So N writers, in one or in
several processes, can write one file together (`clip` divides a layout). An extent that needs
checksums of other writers is written once their ledgers are merged.

A block is at most `block_size` bytes and ends at a multiple of `block_size` in the file. It is
filled from the parts it covers while others are written (FastPersist's double buffering), by the
current `Route`. On a direct route the unaligned first and last page of a range are written through
the page cache; no page is written both directly and through it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastserial import trace
from fastserial.checksums import CrcLedger
from fastserial.config import Config
from fastserial.config.performance import PAGE
from fastserial.engines import Completion, Engine, Op, Request, create, start
from fastserial.errors import EngineError
from fastserial.files.caching import Timing, begin_writeback
from fastserial.files.linux import reserve
from fastserial.formats.extents import Data, Extent
from fastserial.interrupts import finish
from fastserial.memory.buffers import BufferPool, on_host, open_ring
from fastserial.memory.held_settings import paused_collection, quick_switches
from fastserial.memory.storages import StorageMemory
from fastserial.reports import HOST_ONLY, Transfer
from fastserial.saving.fill import (
    BlockContent,
    ExtentPart,
    fetches,
    held,
    is_borrowed,
    lone_memory,
    prepare,
    write_all,
    write_buffered,
)
from fastserial.saving.route import OutputFile, Route, choose_route

if TYPE_CHECKING:
    import torch

    from fastserial.engines.gds.memory import DirectMemory, Move
    from fastserial.memory.buffers import Buffer, Ring

__all__ = [
    "DeviceBlocks",
    "ExtentWriter",
    "Outcome",
]

_log = logging.getLogger("fastserial")
_SWITCHED_OFF = "direct I/O is switched off"
_SCARCE = (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)


@dataclass(slots=True)
class Outcome:
    """What an `ExtentWriter` did so far, for the report. All of it is known once that is closed.

    Attributes:
        engine: the engine's name, or `buffered` as long as there was no need for one.
        direct: whether direct I/O was used last.
        fallback: why the fastest route was not taken, or None.
        transfer: the transfer type taken, and why.
        submit_seconds: latencies from queueing a block until its transfer starts.
        complete_seconds: latencies of the transfers themselves.
        engine_bytes: written by the engine.
        plain_bytes: written without it (the rest of the last page, small files).
    """

    engine: str = "buffered"
    direct: bool = False
    fallback: str | None = None
    transfer: Transfer = HOST_ONLY
    submit_seconds: list[float] = field(default_factory=list)
    complete_seconds: list[float] = field(default_factory=list)
    engine_bytes: int = 0
    plain_bytes: int = 0


class ExtentWriter:
    """Writes extents to one descriptor, which stays the caller's.

    Parts that follow each other in the file share blocks. Raises the `OSError` of the first write
    that failed; then only `close` may follow.

    Attributes:
        outcome: what it did so far, for the report.
    """

    def __init__(
        self,
        fd: int,
        config: Config,
        on_progress: Callable[[int], None] | None = None,
        owner: object = None,
    ) -> None:
        """Start without an engine.

        Args:
            fd: of a file open for writing.
            config: the options.
            on_progress: called with the bytes of each piece that is written.
            owner: kept as long as the descriptor is written to.
        """
        self.outcome = Outcome()
        self._file = OutputFile(fd, owner)
        self._config = config
        self._on_progress = on_progress
        self._expected: int | None = None
        self._reserve_at: int | None = None  # None: nothing is to be reserved
        self._nbytes = 0  # given so far
        self._route: Route | None = None  # of blocks, once there is one
        self._queue: RequestQueue | None = None  # ... and its engine,
        self._timing: Timing | None = None  # ... and how long the device takes
        self._devices = DeviceBlocks(config)
        self._turns = quick_switches()  # other threads release the interpreter's lock sooner
        self._parts: list[ExtentPart] = []  # of the block that is not full yet
        self._ledgers: set[CrcLedger] = set()

    def expect(self, nbytes: int, reserve_at: int | None = None) -> None:
        """Note how many bytes there will be, as far as known.

        Args:
            nbytes: of all that is written.
            reserve_at: offset in the file of the first of them (bytes), if their space is to be
                reserved before the first block; None: others reserve it.

        Raises:
            OSError: there is not enough space.
        """
        self._expected, self._reserve_at = nbytes, reserve_at
        if self._route is not None:
            self._reserve()

    def write(
        self, extents: Iterable[Extent], ledger: CrcLedger | None = None, base: int = 0
    ) -> None:
        """Write extents; their memory must stay as it is until `release_sources` or `finish`.

        Args:
            extents: fastest in file order. One that needs checksums follows the extents that give
                them, unless the ledger has them already.
            ledger: of the layout's checksums.
            base: offset in the file of the layout's first byte (bytes).
        """
        with paused_collection():
            parts = [
                ExtentPart(base + extent.offset, extent.source, extent.start, extent.length, ledger)
                for extent in extents
            ]
        devices = {
            part.source.memory.device
            for part in parts
            if type(part.source) is Data and type(part.source.memory) is StorageMemory
        }
        nbytes = sum([part.length for part in parts])
        self._nbytes += nbytes
        config = self._config
        large = self._nbytes > config.small_file or config.direct is True
        if not large:
            if devices:
                self._devices.copy_at_once("a small file")
            self._write_without_engine(parts, nbytes)
            return
        if devices:
            self._devices.join(devices, self._queue is not None)
        if ledger is not None:
            self._ledgers.add(ledger)
        with trace.step("cut into blocks"):
            for part in parts:
                self._put(part)

    def start(self) -> None:
        """Submit all full blocks now, instead of when no buffer is free."""
        if self._queue is not None:
            self._queue.submit()

    def release_sources(self) -> None:
        """Wait until no memory given so far is needed any more, but for `bytes` objects."""
        self._drain()
        parts, self._parts = self._parts, []
        for part in parts:
            self._parts.extend(held(part) if is_borrowed(part) else [part])

    def finish(self) -> None:
        """Write the last block and wait until everything is written."""
        if self._parts:
            self._dispatch()
        self._drain()
        if self._timing is not None and self._route is not None and self._route.kind == "direct":
            self._timing.confirm()

    def close(self) -> None:
        """Stop the engine and free the buffers, waiting only for writes in flight. Idempotent."""
        finish(self._stop, self._devices.close, self._free)

    def _stop(self) -> None:
        for ledger in self._ledgers:
            ledger.fail()  # if the save failed, a thread may wait for checksums that never come
        if self._queue is not None:
            self._queue.stop()

    def _free(self) -> None:
        self.outcome.transfer = self._devices.transfer
        self._turns.end()
        if self._queue is not None:
            self._queue.pool.close()
            self._queue = None
        self._file.close()
        self._parts = []

    # -- from parts to blocks ------------------------------------------------------------------

    def _put(self, part: ExtentPart) -> None:
        """Take a part. Blocks that are full are queued."""
        offset, source, start, rest, ledger = part
        if self._parts and offset != self._parts[-1].offset + self._parts[-1].length:
            self._dispatch()
        while rest:
            length = min(rest, self._free_bytes(offset))
            self._parts.append(ExtentPart(offset, source, start, length, ledger))
            offset += length
            start += length
            rest -= length
            if not self._free_bytes(offset):
                self._dispatch()

    def _free_bytes(self, offset: int) -> int:
        """Return how many bytes the open block still takes at `offset`.

        A range that begins within a page begins with a block of the rest of that page.
        """
        begin = self._parts[0].offset if self._parts else offset
        if begin % PAGE:
            end = begin + -begin % PAGE
        else:
            size = self._config.block_size if self._route is None else self._route.block_size
            end = begin - begin % size + size
        return end - offset

    def _dispatch(self) -> None:
        """Queue the block that is complete, or the last one."""
        parts, self._parts = self._parts, []
        length = sum(part.length for part in parts)
        route = self._next_route()
        queue = self._queue
        if queue is None:
            self._write_without_engine(parts, length)
            return
        if length > route.block_size:  # copies have no bounds of their own
            raise EngineError(f"{length} bytes do not fit a block of {route.block_size}")
        offset = parts[0].offset
        if self._timing is not None:
            self._timing.take(offset, length)
        aligned = length - length % route.alignment
        direct = route.kind == "direct" and aligned > 0 and offset % route.alignment == 0
        buffer = queue.pool.take()
        move = self._devices.fetch(parts, length, offset, buffer)
        queue.add(
            Request(
                Op.WRITE,
                self._file.direct_fd if direct else self._file.fd,
                offset,
                aligned if direct else length,
                buffer,
                prepare,
                BlockContent(parts, length, self._file, self._devices.ring),
                move=move,
            )
        )

    # -- the route -----------------------------------------------------------------------------

    @trace.traced("start engine")
    def _begin(self) -> Route:
        """Choose the route and start its engine, if there is memory for that."""
        self._turns.begin()
        route = choose_route(self._file, self._config, self._expected)
        self._reserve()
        try:
            self._queue = RequestQueue.open(route, self._devices)
        except (MemoryError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _SCARCE:
                raise
            return self._take(route.without_engine(error))
        self.outcome.engine = self._queue.engine.name
        refusal = None if self._file.direct_fd >= 0 else route.fallback or _SWITCHED_OFF
        if self._devices.open_path(self._queue.engine, self._file.fd, refusal):
            route = route.past_the_host()
        self._timing = Timing(self._file.fd)
        return self._take(route)

    def _reserve(self) -> None:
        if self._expected is not None and self._reserve_at is not None:
            reserve(self._file.fd, self._reserve_at, self._expected, self._config)

    def _next_route(self) -> Route:
        """Return the route of the next block, once there is a buffer for it.

        It changes when a trial has ended.
        """
        route = self._route or self._begin()
        queue = self._queue
        if queue is None:
            return route
        while not queue.pool.free:
            self._reap(queue)
        route = self._route or route  # direct I/O may have been refused in between
        if route.kind == "trial" and self._timing is not None and self._timing.is_enough:
            self._drain()
            route = self._take(route.after_trial(self._timing.judge()))
        return route

    def _take(self, route: Route) -> Route:
        """Use a route from the next block on."""
        self._route = route
        self.outcome.direct = route.kind == "direct"
        self.outcome.fallback = route.fallback
        return route

    # -- the requests --------------------------------------------------------------------------

    def _drain(self) -> None:
        queue = self._queue
        while queue is not None and queue.is_busy:
            self._reap(queue)

    def _reap(self, queue: RequestQueue) -> None:
        """Wait for at least one request and take back its buffer."""
        for completion in queue.reap():
            request = completion.request
            if trace.listener is not None:
                trace.block(request.times)
            self._check(completion)
            block: BlockContent = request.tag
            if request.length < block.length:
                tail = request.buffer.view[request.length : block.length]
                self._write_cached(tail, request.offset + request.length)
            route = self._route
            if route is not None and route.writeback and route.kind == "cached":
                begin_writeback(self._file.fd, request.offset, request.length)
            queue.pool.give(request.buffer)
            queued, started, done = request.times
            self.outcome.submit_seconds.append(started - queued)
            self.outcome.complete_seconds.append(done - started)
            self._advance(block.length)

    def _check(self, completion: Completion) -> None:
        request, error = completion.request, completion.error
        if error is None:
            if completion.transferred == request.length:
                self.outcome.engine_bytes += request.length
                return
            raise OSError(
                errno.EIO, f"only {completion.transferred} of {request.length} bytes were written"
            )
        refused = isinstance(error, OSError) and error.errno == errno.EINVAL
        if self._route is None or not refused or request.fd != self._file.direct_fd:
            raise error
        # The block is filled; the file system takes it only through the page cache.
        route = self._take(self._route.refused())
        _log.debug("%s; going on through the page cache", route.fallback)
        self._write_cached(request.view, request.offset)

    @trace.traced("write tail (page cache)")
    def _write_cached(self, view: memoryview, offset: int) -> None:
        self.outcome.plain_bytes += len(view)
        write_all(self._file.fd, view, offset)

    def _write_without_engine(self, parts: Sequence[ExtentPart], nbytes: int) -> None:
        write_buffered(self._file.fd, parts)
        self.outcome.plain_bytes += nbytes
        self._advance(nbytes)

    def _advance(self, nbytes: int) -> None:
        if self._on_progress is not None:
            self._on_progress(nbytes)


class RequestQueue:
    """An engine, its staging buffers, and the requests it is given; for one thread.

    Attributes:
        engine: moves the blocks.
        pool: buffers for them; the caller of `reap` gives each request's buffer back.
    """

    def __init__(self, engine: Engine, pool: BufferPool) -> None:
        """Take an engine that is open on the pool's buffers."""
        self.engine = engine
        self.pool = pool
        self._batch: list[Request] = []
        self._in_flight = 0

    @classmethod
    def open(cls, route: Route, devices: DeviceBlocks) -> RequestQueue:
        """Start the engine of a route on its number of buffers.

        Args:
            route: one with an engine.
            devices: provide the buffers, if there are any devices.

        Raises:
            EngineUnavailableError: it cannot run here.
            MemoryError, OSError: there is no memory or no descriptor left.
        """
        if route.engine is None:
            raise EngineError("the route has no engine")
        engine = create(route.engine, route.threads)
        pool = start(engine, route.queue_depth, route.block_size, devices.open_ring(engine))
        return cls(engine, pool)

    @property
    def is_busy(self) -> bool:
        """Whether there are requests that were not reaped yet."""
        return bool(self._batch) or self._in_flight > 0

    def add(self, request: Request) -> None:
        """Take a request, for the next batch."""
        self._batch.append(request)

    def submit(self) -> None:
        """Give the engine what was added."""
        if self._batch:
            batch, self._batch = self._batch, []
            self._in_flight += len(batch)
            with trace.step("submit"):
                self.engine.submit(batch)

    def reap(self) -> list[Completion]:
        """Return requests that ended, at least one."""
        self.submit()
        with trace.step("wait for blocks"):
            finished = self.engine.wait(1)
        self._in_flight -= len(finished)
        return finished

    @trace.traced("stop engine")
    def stop(self) -> None:
        """Drop requests that have not started, and wait for the others. Idempotent."""
        self.engine.close()
        self._batch = []


class DeviceBlocks:
    """Starts the copies from devices for the blocks of one file. Used by the submitting thread.

    Attributes:
        ring: staging buffers for parts from devices; None: there are none, or not yet.
    """

    def __init__(self, config: Config) -> None:
        self.ring: Ring | None = None
        self._transfer = on_host(config)
        self._config = config
        self._devices: set[torch.device] = set()
        self._path: DirectMemory | None = None  # of device memory, past the host

    @property
    def transfer(self) -> Transfer:
        """The transfer type taken, and why."""
        return self._transfer if self._path is None else self._path.transfer

    def copy_at_once(self, why: str) -> None:
        """Record that each copy from a device is waited for."""
        self._transfer = Transfer("cpu_gpu", why)

    def join(self, devices: Collection[torch.device], begun: bool) -> None:
        """Prepare for parts from devices, as they are after the work queued there now.

        Args:
            devices: where the parts are.
            begun: the engine has its buffers already.
        """
        self._devices.update(devices)
        if self.ring is not None:
            self.ring.join(devices)
            if self._path is not None:
                self._path.join(devices)
        elif begun:
            self.copy_at_once("the file began with blocks of the host")

    def open_ring(self, engine: Engine) -> Ring | None:
        """Return staging buffers for parts from devices; None: there are no such parts."""
        if self._devices:
            any_memory = engine.capabilities.any_memory
            self.ring, self._transfer = open_ring(self._config, self._devices, any_memory)
        return self.ring

    def open_path(self, engine: Engine, fd: int, refusal: str | None) -> bool:
        """Prepare for blocks that do not pass through the host, if the options ask for that.

        Args:
            engine: what moves the blocks.
            fd: of the file.
            refusal: why the file takes no direct I/O, or None.

        Returns:
            Whether blocks may go past the host.
        """
        if self.ring is None:
            return False
        from fastserial.engines.gds.memory import offer  # not without a device

        flags = os.O_WRONLY | fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_SYNC
        self._path, self._transfer = offer(
            self._config, self._transfer, self.ring, engine, self._devices, fd, flags, refusal
        )
        return self._path is not None

    def fetch(
        self, parts: Sequence[ExtentPart], length: int, offset: int, buffer: Buffer
    ) -> Move | None:
        """Start the copies from devices to a buffer.

        Args:
            parts: what the block consists of.
            length, offset: of the block in the file (bytes).
            buffer: one that was taken.

        Returns:
            What moves the block; None: the engine does.

        Raises:
            StorageChangedError: a storage was resized.
        """
        if self.ring is None:
            return None
        path = self._path
        lone = lone_memory(parts) if path is not None else None
        if path is not None and lone is not None:
            memory, shown = lone
            if path.takes(memory.device, offset, length):
                first = parts[0].start
                return path.write(buffer, memory, first, length, shown)
        self.ring.fetch(buffer, fetches(parts))
        return None

    def close(self) -> None:
        """Wait for transfers past the host; the ring is closed after this. Idempotent."""
        if self._path is not None:
            self._path.close()
