"""Blocks of one file from an engine into memory, several at a time.

The policy decides how a range of the file is read: through the page cache, directly, or on the
device path. The pump submits blocks, reaps completions, and recovers: a direct read that the file
system refuses is repeated through the page cache. A block arrives in a staging buffer, or in its
final memory. The thread that read it then delivers it (copies and checksums it), while other
blocks are being read.

A cold file is read through the page cache in lanes. The kernel reads ahead, into large folios, on a
descriptor that is read in order; threads that share a descriptor do not read in order. So the file
is cut into spans. Each is read in order on the descriptor of its lane, and the lanes alternate.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from fastserial.config import Config
from fastserial.config.performance import (
    DIRECT_BLOCKS,
    LANE_SPAN,
    LANES,
    MOSTLY_CACHED,
    SCATTERED_BLOCK,
)
from fastserial.engines import Completion, Engine, Op, Request, create, start
from fastserial.errors import CorruptCheckpointError, EngineError
from fastserial.files import linux
from fastserial.files.linux import (
    DirectFile,
    cached_fraction,
    open_direct,
    preadv,
    reads_through_cache,
)
from fastserial.interrupts import Descriptors, finish, is_foreign, suppress
from fastserial.memory.buffers import Buffer, BufferPool
from fastserial.reasons import ASKED_ONCE, Reason
from fastserial.reports import HOST_ONLY, Transfer

if TYPE_CHECKING:
    import torch

    from fastserial.engines.gds.memory import DirectMemory
    from fastserial.memory.buffers import Ring

_log = logging.getLogger("fastserial")


class ReadPolicy:
    """Decides how one file is read, and holds the descriptors for it.

    Attributes:
        alignment: of offset, length and memory of direct reads (bytes).
        fallback: why there is no direct I/O although it is wanted, or None.
        device_path: what reads to devices without the host, or None.
        lanes: descriptors that share the reading of a cold file through the page cache.
    """

    def __init__(self, fd: int, size: int, config: Config) -> None:
        """Decide for a file of `size` bytes behind descriptor `fd`, which stays the caller's."""
        self._fd = fd
        self._config = config
        self._files = Descriptors()
        self._lane_files = Descriptors()
        self._refused = False
        self._transfer = HOST_ONLY
        self.device_path: DirectMemory | None = None
        self.lanes: list[int] = []
        direct = self._open_direct(size)
        self.alignment, self.fallback = direct.alignment, direct.refusal
        self.direct_fd = direct.fd  # stays open after a refusal: requests in flight name it

    def _open_direct(self, size: int) -> DirectFile:
        config = self._config
        small = size <= config.small_file
        if config.never_direct or (small and config.direct is not True):
            return DirectFile(-1)
        if reads_through_cache(config, size):
            return DirectFile(-1)
        if config.direct is not True and linux.refuses_direct(self._fd, os.O_RDONLY):
            return DirectFile(-1)  # there is nothing faster
        return open_direct(self._fd, os.O_RDONLY, config.block_size, self._files)

    # -- a range -------------------------------------------------------------------------------

    @property
    def never_direct(self) -> bool:
        """Whether every range is read through the page cache."""
        return self.direct_fd < 0

    def reads_directly(self, offset: int, length: int) -> bool:
        """Return whether to read these bytes with direct I/O: they are not in the page cache."""
        if self.never_direct or self._refused:
            return False
        return not self._is_cached(offset, length)

    def takes_device_path(self, device: torch.device, offset: int, length: int) -> bool:
        """Return whether to read these bytes to a device without the host."""
        if self.device_path is None or not self.device_path.takes(device, offset, length):
            return False
        return not self._is_cached(offset, length)

    def _is_cached(self, offset: int, length: int) -> bool:
        """Return whether to read bytes through the page cache: most of them are in it."""
        if self._config.direct is True:
            return False
        fraction = cached_fraction(self._fd, offset, length)
        return fraction is not None and fraction >= MOSTLY_CACHED

    def descriptor(self, offset: int) -> int:
        """Return the descriptor for reading a byte of the file through the page cache."""
        return self.lanes[lane_of(offset, len(self.lanes))] if self.lanes else self._fd

    def refuse_direct(self) -> None:
        """Continue through the page cache: the file system accepted the flag, but not the read."""
        self._refused = True
        linux.refuse_direct(self._fd, os.O_RDONLY)
        if self.fallback is None:
            what = "direct I/O refused at the first read: Invalid argument"
            self.fallback = Reason(what, ASKED_ONCE)
            _log.debug("%s; continuing through the page cache", self.fallback)

    # -- reads in the order of the file --------------------------------------------------------

    def open_lanes(self, first: int, stop: int, nbytes: int) -> None:
        """Prepare for reading `nbytes` bytes of range [first, stop) in the order of the file.

        If they are not in the page cache, several descriptors share them, until `close_lanes`.
        """
        if not self.never_direct or nbytes <= self._config.small_file:
            return
        if (cached_fraction(self._fd, first, stop - first) or 0.0) >= MOSTLY_CACHED:
            return
        with suppress(OSError):  # without /proc, or with no descriptor left
            while len(self.lanes) < min(self._config.queue_depth, LANES):
                self.lanes.append(linux.reopen(self._fd, os.O_RDONLY, self._lane_files))

    def close_lanes(self) -> None:
        """Return to one descriptor; no read is in progress."""
        self.lanes = []
        self._lane_files.close()

    # -- devices -------------------------------------------------------------------------------

    @property
    def transfer(self) -> Transfer:
        """The transfer type of reads to devices, and why it was chosen."""
        return self._transfer if self.device_path is None else self.device_path.transfer

    def serve_devices(
        self, ring: Ring | None, devices: Collection[torch.device], taken: Transfer, engine: Engine
    ) -> None:
        """Read to devices without the host, if that was requested and is possible.

        Args:
            ring: the staging buffers of what passes through the host, if anything does.
            devices: the devices.
            taken: the transfer type of what passes through the host.
            engine: reads the blocks.
        """
        from fastserial.engines.gds.memory import offer  # not without a device

        refusal = "direct I/O is switched off" if self._config.never_direct else None
        self.device_path, self._transfer = offer(
            self._config, taken, ring, engine, devices, self._fd, os.O_RDONLY, refusal
        )

    def close(self) -> None:
        """Close all descriptors; no read is in progress. Idempotent."""
        device_path = self.device_path
        finish(
            *([device_path.close] if device_path is not None else []),
            self._lane_files.close,
            self._files.close,
        )
        self.direct_fd = -1


# -- lanes ---------------------------------------------------------------------------------------


def lane_of(offset: int, lanes: int) -> int:
    """Return the lane of a byte of the file."""
    return offset // LANE_SPAN % lanes


def in_turns(blocks: Iterable[Block | None], lanes: int) -> Iterator[Block | None]:
    """Yield blocks, which are given in the order of the file, so that the lanes alternate.

    Args:
        blocks: what is to be read; None: no further block is known yet. It is passed on, behind
            those held back.
        lanes: how many there are.
    """
    held: list[deque[Block]] = [deque() for _ in range(lanes)]
    group = -1

    def turns() -> Iterator[Block]:
        while any(held):
            for lane in held:
                if lane:
                    yield lane.popleft()

    for block in blocks:
        if block is None:
            yield from turns()
            yield None
            continue
        number = block.offset // (LANE_SPAN * lanes)
        if number != group:
            yield from turns()
            group = number
        held[lane_of(block.offset, lanes)].append(block)
    yield from turns()


# Where the bytes of a block arrive before they are delivered:
# - None: in a staging buffer, which exists during the delivery only;
# - a buffer: in their final memory (`Pump.takes_any_memory`);
# - a list: in pieces of memory, one after the other (`Pump.takes_any_memory`, not direct);
# - a tensor, one-dimensional uint8: in device memory, without the host
#   (`ReadPolicy.takes_device_path`). They are delivered only if that fails, from a staging buffer.
Target: TypeAlias = "Buffer | list[memoryview] | torch.Tensor | None"
_NOTHING = Buffer(-1, memoryview(b""), 0)


@dataclass(slots=True)
class Block:
    """One read.

    Attributes:
        offset, length: range in the file (bytes). For direct I/O both are multiples of
            `ReadPolicy.alignment`, or the block ends where the file does.
        deliver: called once with the bytes and their address, on any thread; with no bytes if
            they arrived in pieces.
        target: where they arrive before that.
        direct: read it directly.
        arrived: called with the block, by the thread that reaps it.
        prepare: called before it is submitted, while others are being read.
    """

    offset: int
    length: int
    deliver: Callable[[memoryview, int], None]
    target: Target = None
    direct: bool = False
    arrived: Callable[[Block], None] | None = None
    prepare: Callable[[], None] | None = None


@dataclass(slots=True)
class ReadCounts:
    """Bytes read so far, directly and not."""

    direct: int = 0
    cached: int = 0


def _open_engine(config: Config) -> tuple[Engine, BufferPool]:
    """Return a new engine and its staging buffers: no memory before they are used.

    Raises:
        EngineUnavailableError: the configured engine cannot run here.
    """
    engine = create(config.engine, config.threads)
    return engine, start(engine, config.queue_depth, config.block_size)


class Pump:
    """Reads blocks of a file. Used by one thread; blocks are delivered on the engine's threads.

    The first error ends it: then only `close` may follow.

    Attributes:
        policy: how ranges of the file are read.
        counts: what was read.
        error: what ended the reading, None while there is no error.
        ring: pinned staging buffers, after `stage_in`.
        size: bytes of the file.
        block_size: bytes of a staging buffer.
    """

    def __init__(
        self,
        fd: int,
        size: int,
        config: Config,
        on_progress: Callable[[int], None] | None = None,
        owner: object = None,
    ) -> None:
        """Read from descriptor `fd`, which stays the caller's, up to byte `size`.

        Args:
            owner: kept as long as the descriptor is read from.

        Raises:
            EngineUnavailableError: the configured engine cannot read here.
        """
        self.counts = ReadCounts()
        self.error: BaseException | None = None
        self.ring: Ring | None = None
        self.size = size
        self.block_size = config.block_size
        self._fd = fd
        self._config = config
        self._on_progress = on_progress
        self._owner = owner
        self._in_flight = 0
        self._batch: list[Request] = []
        self.policy = ReadPolicy(fd, size, config)
        self._engine, self._buffers = _open_engine(config)

    @property
    def engine_name(self) -> str:
        return self._engine.name

    @property
    def takes_any_memory(self) -> bool:
        """Whether blocks can be read to any memory, not only to staging buffers."""
        return self._engine.capabilities.any_memory

    @property
    def range_size(self) -> int:
        """Bytes of the ranges of the file that are read separately."""
        policy = self.policy
        if not self.takes_any_memory or policy.lanes or policy.device_path is not None:
            return self.block_size
        if policy.never_direct:
            return SCATTERED_BLOCK
        return self.block_size * DIRECT_BLOCKS

    @property
    def fallback(self) -> str | None:
        """Why there is no direct I/O although it is wanted."""
        return self.policy.fallback

    def stage_in(
        self, ring: Ring | None, devices: Collection[torch.device], taken: Transfer
    ) -> None:
        """Use the buffers of a ring as staging buffers from here on; `close` closes it.

        Args:
            ring: the staging buffers of blocks to devices, None if no block needs one.
            devices: the devices.
            taken: their transfer type.
        """
        self.ring = ring
        self.policy.serve_devices(ring, devices, taken, self._engine)

    def join(self, devices: Collection[torch.device]) -> None:
        """Prepare for more blocks to devices, after `stage_in`."""
        if self.ring is not None:
            self.ring.join(devices)
        if self.policy.device_path is not None:
            self.policy.device_path.join(devices)

    # -- many blocks ---------------------------------------------------------------------------

    def expect(self, first: int, stop: int, nbytes: int) -> None:
        """Prepare for reading `nbytes` bytes of range [first, stop) in the order of the file."""
        if self.takes_any_memory:
            self.policy.open_lanes(first, stop, nbytes)

    def read(self, blocks: Iterable[Block]) -> None:
        """Read blocks in the order of the file; returns when all have been delivered.

        Raises:
            OSError: a read failed.
            CorruptCheckpointError: the file is shorter than it was.
        """
        for block in self.ordered(blocks):
            if block is not None:
                self.put(block)
        self.drain()
        self.policy.close_lanes()

    def ordered(self, blocks: Iterable[Block | None]) -> Iterator[Block | None]:
        """Return blocks in the order in which they are to be read.

        Args:
            blocks: in the order of the file; None: no further block is known yet, so those held
                back must be read. It is passed on behind them.
        """
        lanes = len(self.policy.lanes)
        return in_turns(blocks, lanes) if lanes else iter(blocks)

    @property
    def in_flight(self) -> int:
        """Blocks given that have not been reaped."""
        return self._in_flight + len(self._batch)

    @property
    def has_room(self) -> bool:
        """Whether `put` need not wait for other blocks."""
        return self.in_flight < (len(self.policy.lanes) or self._config.queue_depth)

    def put(self, block: Block) -> None:
        """Queue a block; waits for others if the queue is full.

        Raises:
            OSError: a read failed.
            CorruptCheckpointError: the file is shorter than it was.
        """
        while not self.has_room:
            self.reap()
        if block.prepare is not None:
            self.flush()
            block.prepare()
        self._batch.append(self._request(block))

    def drain(self) -> None:
        """Wait until all blocks have delivered."""
        while self.in_flight:
            self.reap()

    def flush(self) -> None:
        """Start what is queued."""
        if self._batch:
            batch, self._batch = self._batch, []
            self._in_flight += len(batch)
            try:
                self._engine.submit(batch)
            except (OSError, EngineError) as error:
                self._note(error)
                raise

    def reap(self, minimum: int = 1) -> None:
        """Wait for at least `minimum` blocks.

        Raises:
            OSError: a read failed.
            CorruptCheckpointError: the file is shorter than it was.
        """
        self.flush()
        try:
            completions = self._engine.wait(minimum)
        except (OSError, EngineError) as error:
            self._note(error)
            raise
        for completion in completions:
            self._in_flight -= 1
            self._complete(completion)

    def close(self) -> None:
        """Stop the engine and free the buffers, waiting only for reads in progress. Idempotent."""
        finish(self._engine.close, self._buffers.close, self.policy.close, self._free)

    def _free(self) -> None:
        self._batch = []
        self._in_flight = 0
        self._owner = None
        if self.ring is not None:
            self.ring.close()

    # -- one block -----------------------------------------------------------------------------

    def _request(self, block: Block) -> Request:
        policy, length = self.policy, block.length
        fd = policy.descriptor(block.offset)
        pieces: Sequence[memoryview] | None = None
        move: Callable[[Request], int] | None = None
        match block.target:
            case Buffer() as memory:
                buffer = memory
            case list() as views:
                buffer, pieces = _NOTHING, views
            case target:
                buffer = self._staging_buffer()
                if target is not None and policy.device_path is not None:
                    move = policy.device_path.read(target)
        aligned = length - length % policy.alignment
        if block.direct and aligned and not (block.offset | buffer.address) % policy.alignment:
            fd, length = policy.direct_fd, aligned
        return Request(
            Op.READ, fd, block.offset, length, buffer,
            tag=block, finish=self._finish, pieces=pieces, move=move,
        )  # fmt: skip

    @property
    def _pool(self) -> BufferPool:
        return self._buffers if self.ring is None else self.ring

    def _staging_buffer(self) -> Buffer:
        pool = self._pool
        while not pool.free:
            self.reap()
        return pool.take()

    def _finish(self, request: Request, moved: int) -> None:
        """Read what is not aligned at the file's end, and deliver the block."""
        block: Block = request.tag
        if request.move is not None:
            return  # the device has all of it
        request.length = block.length
        while moved < block.length:
            got = preadv(self._fd, request.rest(moved), block.offset + moved)
            if got == 0:
                raise CorruptCheckpointError(
                    "the file became shorter while it was read", offset=block.offset + moved
                )
            moved += got
        block.deliver(request.view, request.buffer.address)

    def _complete(self, completion: Completion) -> None:
        request, error = completion.request, completion.error
        block: Block = request.tag
        direct = request.fd == self.policy.direct_fd or request.move is not None
        if error is not None:
            self._recover(request, error, direct)
            direct = False
        if not isinstance(block.target, Buffer | list):
            self._pool.give(request.buffer)
        self._count(request, direct)
        if block.arrived is not None:
            block.arrived(block)
        if self._on_progress is not None:
            self._on_progress(block.length)

    def _recover(self, request: Request, error: BaseException, direct: bool) -> None:
        """Read a block through the page cache after the file system refused direct I/O."""
        # `moved`: it was not the read that failed, but the delivery
        refused = isinstance(error, OSError) and error.errno == errno.EINVAL
        if not (direct and refused) or request.moved:
            if isinstance(error, Exception):
                self._note(error)
            raise error
        self.policy.refuse_direct()
        try:
            self._finish(request, 0)
        except (OSError, CorruptCheckpointError) as final:
            self._note(final)
            raise

    def _note(self, error: Exception) -> None:
        """Record what ended the reading, unless a signal handler raised it on this thread."""
        if not is_foreign(error):
            self.error = error

    def _count(self, request: Request, direct: bool) -> None:
        counts, length = self.counts, request.tag.length
        if direct:
            counts.direct += length
        else:
            counts.cached += length
