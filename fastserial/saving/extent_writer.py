"""Writes extents of a layout to a file: small files through the page cache, large ones in blocks.

A writer takes any extents of a layout, in any order, and any open file. So N writers, in one or in
several processes, can write one file together (`clip` divides a layout). An extent that needs
checksums of other writers is written once their ledgers are merged.

A block is at most `block_size` bytes and ends at a multiple of `block_size` in the file. It is
filled while others are written (FastPersist's double buffering), by the current `Route`. On a
direct route the unaligned first and last page of a range are written through the page cache; no
page is written both directly and through it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from fastserial.checksums import CrcLedger
from fastserial.config import Config
from fastserial.config.performance import FILL_CHUNK, PAGE
from fastserial.engines import (
    Capabilities,
    Completion,
    Engine,
    EngineFactory,
    Op,
    Request,
    capabilities_of,
    create,
    factory_of,
    start,
)
from fastserial.errors import EngineError
from fastserial.files.linux import (
    DirectFile,
    Trial,
    begin_writeback,
    compresses,
    fits,
    is_fast,
    open_direct,
    refuse_direct,
    refuses_direct,
    write_all,
)
from fastserial.formats.extents import Data, Extent
from fastserial.interrupts import Descriptors, finish, ours
from fastserial.memory.buffers import BufferPool, on_host, open_ring
from fastserial.memory.held_settings import Hold, paused_collection, quick_switches
from fastserial.memory.storages import DeviceMemory
from fastserial.reasons import ASKED_ONCE, QUICKER, SEE_DOCTOR, Reason
from fastserial.reports import HOST_ONLY, Transfer
from fastserial.saving.fill import (
    BlockContent,
    device_copies,
    device_memory,
    fill,
    fill_request,
)

if TYPE_CHECKING:
    import torch

    from fastserial.engines.gds.memory import DirectMemory, Move
    from fastserial.memory.buffers import Buffer, Ring


_log = logging.getLogger("fastserial")
_SWITCHED_OFF = "direct I/O is switched off"
_SCARCE = (errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
_COMPRESSED = Reason("the file system compresses this file, but not direct writes", QUICKER)
_REFUSED = Reason("direct I/O refused at the first write: Invalid argument", ASKED_ONCE)
_RouteKind = Literal["direct", "cached", "trial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How the blocks of one file get to its device. Sizes are bytes.

    Attributes:
        kind: `direct`: past the page cache, but for what is not aligned; `cached`: through it;
            `trial`: through it, until it is known whether direct I/O is faster.
        engine: makes the engine; None: there is no memory for one.
        block_size: of a block at most.
        queue_depth: blocks in flight at once.
        threads: that the engine may start.
        direct_fd: the file, open for direct I/O; -1: it is not.
        alignment: of what direct I/O writes.
        writeback: the device starts to write each block as soon as it is in the page cache.
        fallback: why this is not the fastest route, or None.
    """

    kind: _RouteKind
    engine: EngineFactory | None
    block_size: int
    queue_depth: int
    threads: int
    direct_fd: int = -1
    alignment: int = PAGE
    writeback: bool = False
    fallback: Reason | None = None

    def after_trial(self, fast: bool) -> Route:
        """Return the route once the device was measured, or goes past the host: that is fast."""
        return replace(self, kind="direct" if fast else "cached")

    def refused(self) -> Route:
        """Return the route of a file that refused a direct write."""
        return replace(self, kind="cached", writeback=False, fallback=_REFUSED)

    def without_engine(self, why: object) -> Route:
        """Return the route that needs no memory: block by block, by the calling thread."""
        fallback = Reason(f"through the page cache, block by block: {why}", SEE_DOCTOR)
        return replace(self, kind="cached", engine=None, block_size=FILL_CHUNK, fallback=fallback)


def choose_route(fd: int, files: Descriptors, config: Config, expected: int | None) -> Route:
    """Return the route of a file's first block.

    Args:
        fd: of the file.
        files: owns the descriptor for direct I/O.
        config: the options.
        expected: bytes to be written, if known: a short file gets fewer buffers and threads.

    Raises:
        EngineUnavailableError: the engine cannot run here.
    """
    depth, threads = config.queue_depth, config.threads
    if expected is not None:
        blocks = max(1, -(-expected // config.block_size))
        depth, threads = min(blocks, depth), min(blocks, threads)
    engine = factory_of(config.engine)
    found = DirectFile(-1)
    kind: _RouteKind = "cached"
    if config.never_direct:
        pass
    elif config.direct is not True and refuses_direct(fd, os.O_WRONLY):
        pass  # there is nothing faster
    elif config.direct is not True and compresses(fd):
        found = DirectFile(-1, refusal=_COMPRESSED)
    else:
        synced = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_SYNC  # or O_DSYNC, part of it
        found = open_direct(fd, os.O_WRONLY | synced, config.block_size, files)
        if found.refusal is None:
            kind = _fastest(fd, config, capabilities_of(engine), expected or 0)
    return Route(
        kind=kind,
        engine=engine,
        block_size=config.block_size,
        queue_depth=depth,
        threads=threads,
        direct_fd=found.fd,
        alignment=found.alignment,
        writeback=found.fd >= 0 and config.durable,
        fallback=found.refusal,
    )


def _fastest(fd: int, config: Config, capabilities: Capabilities, nbytes: int) -> _RouteKind:
    """Return the fastest kind for a file that takes direct I/O; of equals, the cached one."""
    if not capabilities.any_memory:
        return "direct"  # such an engine is slow with the page cache
    if config.direct is True or config.cache == "drop":
        return "direct"
    if config.cache == "keep":
        return "cached"
    fast = is_fast(fd)
    if fast or not fits(nbytes):
        return "direct"
    return "trial" if fast is None else "cached"


@dataclass(slots=True)
class Outcome:
    """What an `ExtentWriter` did so far, for the report. All of it is known once that is closed.

    Attributes:
        engine: the engine's name, or `buffered` as long as there was no need for one.
        direct: whether direct I/O was used last.
        fallback: why the fastest route was not taken, or None.
        transfer: the transfer type taken, and why.
        engine_bytes: written by the engine.
        plain_bytes: written without it (the rest of the last page, small files).
    """

    engine: str = "buffered"
    direct: bool = False
    fallback: str | None = None
    transfer: Transfer = HOST_ONLY
    engine_bytes: int = 0
    plain_bytes: int = 0


class ExtentWriter:
    """Writes extents to one descriptor, which stays the caller's.

    Extents that follow each other in the file share blocks. Raises the `OSError` of the first write
    that failed; then only `close` may follow.

    Attributes:
        outcome: what it did so far, for the report.
    """

    def __init__(
        self,
        fd: int,
        config: Config,
        on_progress: Callable[[int], object] = bool,
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
        self._fd = fd
        self._files = Descriptors()  # the file again, for direct I/O
        self._owner = owner
        self._config = config
        self._on_progress = on_progress
        self._expected: int | None = None
        self._nbytes = 0  # passed to `write` so far
        self._route: Route | None = None  # of blocks, once there is one
        self._queue: RequestQueue | None = None  # ... and its engine,
        self._trial: Trial | None = None  # ... of the device, while it lasts
        self._devices = DeviceBlocks(config)
        self._turns: Hold | None = None  # other threads release the interpreter's lock sooner
        self._plain_buffer = bytearray()  # of blocks that need no engine
        self._block: list[Extent] = []  # of the block that is not full yet
        self._block_end = 0  # where that ends in the file so far
        self._ledger: CrcLedger | None = None  # of the block

    def expect(self, nbytes: int, devices: Collection[torch.device] = ()) -> None:
        """Note how many bytes there will be, as far as known, and the devices that hold some."""
        self._expected = nbytes
        self._devices.expect(devices)

    def write(
        self, extents: Iterable[Extent], ledger: CrcLedger | None = None, base: int = 0
    ) -> None:
        """Write extents; their memory must stay as it is until `flush`.

        Args:
            extents: fastest in file order. One that needs checksums follows the extents that give
                them, unless the ledger has them already.
            ledger: of the layout's checksums.
            base: offset in the file of the layout's first byte (bytes).
        """
        given = list(extents)
        if base:
            with paused_collection():
                given = [Extent(base + e.offset, e.length, e.source, e.start) for e in given]
        devices = {
            extent.source.memory.device
            for extent in given
            if type(extent.source) is Data and isinstance(extent.source.memory, DeviceMemory)
        }
        nbytes = sum([extent.length for extent in given])
        self._nbytes += nbytes
        if ledger is not self._ledger:
            self.flush()
            self._ledger = ledger
        if self._nbytes <= self._config.small_file and self._config.direct is not True:
            if devices:
                self._devices.copy_at_once("a small file")
            for extent in given:
                self._put(extent, FILL_CHUNK)
            self._dispatch()
            return
        if devices:
            self._devices.join(devices, self._queue is not None)
        route = self._route or self._begin()  # before the first block is cut
        for extent in given:
            self._put(extent, route.block_size)

    def start(self) -> None:
        """Submit all full blocks now, instead of when no buffer is free."""
        if self._queue is not None:
            self._queue.submit()

    def flush(self) -> None:
        """Write the last block, and wait until no memory given so far is needed any more."""
        self._dispatch()
        self._drain()

    def close(self) -> None:
        """Stop the engine and free the buffers, waiting only for writes in flight. Idempotent."""
        finish(self._stop, self._devices.close, self._free)

    def _stop(self) -> None:
        if self._ledger is not None:
            self._ledger.fail()  # if the save failed, a thread may wait for checksums in vain
        if self._queue is not None:
            self._queue.stop()

    def _free(self) -> None:
        self.outcome.transfer = self._devices.transfer
        if self._turns is not None:
            self._turns.end()
        if self._ledger is not None:
            self._ledger.end()
        if self._queue is not None:
            self._queue.pool.close()
            self._queue = None
        self._files.close()
        self._block = []

    # -- from extents to blocks ----------------------------------------------------------------

    def _put(self, extent: Extent, block_size: int) -> None:
        """Cut an extent at the ends of blocks. Blocks that are full are queued.

        A block that begins within a page is the rest of that page.
        """
        offset, rest, source, start = extent
        if offset != self._block_end:
            self._dispatch()
        while rest:
            first = self._block[0].offset if self._block else offset
            size = PAGE if first % PAGE else block_size
            end = first - first % size + size
            length = min(rest, end - offset)
            self._block.append(Extent(offset, length, source, start))
            offset += length
            start += length
            rest -= length
            if offset == end:
                self._dispatch()
        self._block_end = offset

    def _dispatch(self) -> None:
        """Queue the block that is complete, or the last one."""
        extents, self._block = self._block, []
        if not extents:
            return
        offset = extents[0].offset
        length = sum([extent.length for extent in extents])
        ledger = self._ledger
        if self._queue is None:
            self._write_without_engine(extents, offset, length)
            return
        route, queue = self._next_route(self._queue), self._queue
        if self._trial is not None:
            self._trial.take(offset, length)
        aligned = length - length % route.alignment
        direct = route.kind == "direct" and aligned > 0 and offset % route.alignment == 0
        buffer = queue.pool.take()
        move = self._devices.fetch(extents, length, offset, buffer)
        files = (self._owner, self._files)
        queue.add(
            Request(
                Op.WRITE,
                route.direct_fd if direct else self._fd,
                offset,
                aligned if direct else length,
                buffer,
                fill_request,
                BlockContent(extents, length, ledger, files, self._devices.ring),
                move=move,
            )
        )

    # -- the route -----------------------------------------------------------------------------

    def _begin(self) -> Route:
        """Choose the route and start its engine, if there is memory for that."""
        self._turns = quick_switches()
        self._turns.begin()
        route = choose_route(self._fd, self._files, self._config, self._expected)
        try:
            self._queue = RequestQueue.open(route, self._devices)
        except ours(MemoryError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _SCARCE:
                raise
            return self._take(route.without_engine(error))
        self.outcome.engine = self._queue.engine.name
        refusal = None if route.direct_fd >= 0 else route.fallback or _SWITCHED_OFF
        if self._devices.open_path(self._queue.engine, self._fd, refusal):
            route = route.after_trial(True)
        self._trial = Trial(self._fd) if route.kind == "trial" else None
        return self._take(route)

    def _next_route(self, queue: RequestQueue) -> Route:
        """Return the route of the next block, once there is a buffer for it.

        It changes when a trial has ended.
        """
        while not queue.pool.free:
            self._reap(queue)
        route = self._current_route  # direct I/O may have been refused in between
        if route.kind == "trial" and self._trial is not None and self._trial.is_enough:
            self._drain()
            route = self._take(route.after_trial(self._trial.judge()))
            self._trial = None
        return route

    @property
    def _current_route(self) -> Route:
        if self._route is None:
            raise EngineError("a block is written before its route is chosen")
        return self._route

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
        finished = queue.reap()
        try:
            for completion in finished:
                self._conclude(completion, queue)
        except BaseException:
            for completion in finished:  # the traceback of its error leads to it
                completion.error = None
            raise

    def _conclude(self, completion: Completion, queue: RequestQueue) -> None:
        request = completion.request
        self._check(completion)
        block: BlockContent = request.tag
        if request.length < block.length:
            tail = request.buffer.view[request.length : block.length]
            self._write_cached(tail, request.offset + request.length)
        route = self._current_route
        if route.writeback and route.kind == "cached":
            begin_writeback(self._fd, request.offset, request.length)
        queue.pool.give(request.buffer)
        self._on_progress(block.length)

    def _check(self, completion: Completion) -> None:
        request, error = completion.request, completion.error
        if error is None:
            if completion.transferred == request.length:
                self.outcome.engine_bytes += request.length
                return
            raise OSError(
                errno.EIO, f"only {completion.transferred} of {request.length} bytes were written"
            )
        route = self._current_route
        refused = isinstance(error, OSError) and error.errno == errno.EINVAL
        if not refused or request.fd != route.direct_fd:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        # The block is filled; the file system takes it only through the page cache.
        refuse_direct(self._fd, os.O_WRONLY)
        route = self._take(route.refused())
        _log.debug("%s; going on through the page cache", route.fallback)
        self._write_cached(request.view, request.offset)

    def _write_cached(self, view: memoryview, offset: int) -> None:
        self.outcome.plain_bytes += len(view)
        write_all(self._fd, view, offset)

    def _write_without_engine(self, extents: list[Extent], offset: int, length: int) -> None:
        buffer = self._plain_buffer
        if len(buffer) < length:
            buffer = self._plain_buffer = bytearray(length)
        view = memoryview(buffer)[:length]
        fill(extents, self._ledger, view, ctypes.addressof(ctypes.c_char.from_buffer(buffer)))
        self._write_cached(view, offset)
        self._on_progress(length)


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
            self.engine.submit(batch)

    def reap(self) -> list[Completion]:
        """Return requests that ended, at least one."""
        self.submit()
        finished = self.engine.wait(1)
        self._in_flight -= len(finished)
        return finished

    def stop(self) -> None:
        """Drop requests that have not started, and wait for the others. Idempotent."""
        self.engine.close()
        self._batch = []


class DeviceBlocks:
    """Starts the copies from devices for the blocks of one file. Used by the submitting thread.

    Attributes:
        ring: staging buffers for extents from devices; None: there are none, or not yet.
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

    def expect(self, devices: Collection[torch.device]) -> None:
        """Note devices that hold later extents: the first may be of the host."""
        self._devices.update(devices)

    def join(self, devices: Collection[torch.device], begun: bool) -> None:
        """Prepare for extents from devices, with their content after the work that is queued now.

        Args:
            devices: that hold the extents.
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
        """Return staging buffers for extents from devices; None: there are no such extents."""
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
        self, extents: Sequence[Extent], length: int, offset: int, buffer: Buffer
    ) -> Move | None:
        """Start the copies from devices to a buffer.

        Args:
            extents: what the block consists of.
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
        alone = device_memory(extents) if path is not None else None
        if path is not None and alone is not None:
            memory, checksummed = alone
            if path.takes(memory.device, offset, length):
                return path.write(buffer, memory, extents[0].start, length, checksummed)
        self.ring.fetch(buffer, device_copies(extents))
        return None

    def close(self) -> None:
        """Wait for transfers past the host; the ring is closed after this. Idempotent."""
        if self._path is not None:
            self._path.close()
