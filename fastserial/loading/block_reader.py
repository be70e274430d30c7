"""Blocks of one file from an engine into memory, several at a time.

Blocks are read through the page cache, or those that are not in it directly: `files.caching`
says which. A block arrives in a staging buffer, or straight in memory of the caller's, and is then
delivered: copied to where it belongs and checksummed, by the thread that read it, while
other blocks are on their way.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastserial import trace
from fastserial.config import Config
from fastserial.config.performance import LANES, MOSTLY_CACHED, SCATTERED_BLOCK
from fastserial.engines import Completion, Engine, Op, Request
from fastserial.errors import CorruptCheckpointError
from fastserial.files import linux
from fastserial.files.caching import cached_fraction, reads_through_cache
from fastserial.files.linux import DirectFile, open_direct, preadv
from fastserial.interrupts import Descriptors, finish
from fastserial.loading.crew import Crew, Hand, engage
from fastserial.loading.lanes import in_turns, lane_of
from fastserial.memory.buffers import Buffer, BufferPool
from fastserial.reasons import SEE_DOCTOR, Reason
from fastserial.reports import HOST_ONLY, Transfer

if TYPE_CHECKING:
    import torch

    from fastserial.engines.gds.memory import DirectMemory
    from fastserial.memory.ring import Ring

__all__ = ["Block", "BlockReader", "ReadCounts"]

_log = logging.getLogger("fastserial")

Delivery = Callable[[memoryview, int], None]
_NOTHING = Buffer(-1, memoryview(b""), 0)


@dataclass(slots=True)
class Block:
    """One read.

    Attributes:
        offset, length: place in the file (bytes). For direct I/O both are multiples of
            `BlockReader.alignment`, or the block ends where the file does.
        deliver: called once with the bytes and their address, on any thread; with no bytes if
            they are in `pieces`.
        memory: where to put the bytes; None: in a staging buffer, there during `deliver` only.
        fail: called instead if the bytes cannot be read, and the other blocks go on; None: that
            ends the reader.
        direct: read it directly; None: as `BlockReader.goes_direct` says.
        pieces: where to put the bytes instead, one piece of memory after the other
            (`BlockReader.takes_any_memory`).
        prepare: called before the block is read, while others are being read.
        device: device memory (one-dimensional uint8) to read it to past the host
            (`BlockReader.goes_straight`), if that can be; else it is delivered.
    """

    offset: int
    length: int
    deliver: Delivery
    memory: Buffer | None = None
    fail: Callable[[OSError], None] | None = None
    direct: bool | None = None
    pieces: Sequence[memoryview] | None = None
    prepare: Callable[[], None] | None = None
    device: torch.Tensor | None = None


@dataclass(slots=True)
class ReadCounts:
    """Bytes read so far, by the way they took, and the latencies (seconds) of the reads."""

    direct: int = 0
    cached: int = 0
    submit_seconds: list[float] = field(default_factory=list)
    complete_seconds: list[float] = field(default_factory=list)


class BlockReader:
    """Reads blocks of a file. Used by one thread; blocks are delivered on the engine's threads.

    The first error ends it: then only `close` may follow.
    """

    def __init__(
        self,
        fd: int,
        size: int,
        config: Config,
        on_progress: Callable[[int], None] | None = None,
        owner: object = None,
        crew: Crew | None = None,
    ) -> None:
        """Read from descriptor `fd`, which stays the caller's, up to byte `size`.

        Args:
            owner: kept as long as the descriptor is read from.
            crew: where the engine comes from; by default it is a new one.

        Raises:
            EngineUnavailableError: the configured engine cannot read here.
        """
        self.counts = ReadCounts()
        self.ring: Ring | None = None
        self._transfer = HOST_ONLY
        self._straight: DirectMemory | None = None
        self._fd = fd
        self._size = size
        self._config = config
        self._on_progress = on_progress
        self._owner = owner
        self._files = Descriptors()
        self._refused = False
        self._depth = config.queue_depth
        self._lanes: list[int] = []
        self._lane_files = Descriptors()
        self._in_flight = 0
        self._batch: list[Request] = []
        self._crew = crew
        self._hand: Hand | None = engage(config) if crew is None else crew.take(config)
        try:
            direct = self._open_direct()
        except BaseException:
            self.close()
            raise
        self.alignment, self.fallback = direct.alignment, direct.refusal
        self._direct_fd = direct.fd  # stays open after a refusal: requests in flight name it

    @property
    def _engine(self) -> Engine:
        return self._working.engine

    @property
    def _working(self) -> Hand:
        if self._hand is None:
            raise ValueError("I/O operation on closed file.")
        return self._hand

    def rest(self) -> None:
        """Give the engine back to the crew until `wake`; nothing is in flight."""
        hand, self._hand = self._hand, None
        if hand is not None and self._crew is not None:
            self._crew.give(self._config, hand)

    def wake(self) -> None:
        """Take an engine of the crew again.

        Raises:
            EngineUnavailableError: the configured engine cannot read here.
        """
        if self._hand is None and self._crew is not None:
            self._hand = self._crew.take(self._config)

    def _open_direct(self) -> DirectFile:
        config = self._config
        small = self._size <= config.small_file
        if config.never_direct or (small and config.direct is not True):
            return DirectFile(-1)
        if reads_through_cache(config, self._size):
            return DirectFile(-1)
        return open_direct(self._fd, os.O_RDONLY, config.block_size, self._files)

    def stage_in(
        self, ring: Ring | None, places: Collection[torch.device], taken: Transfer
    ) -> None:
        """Use the buffers of a ring as staging buffers from here on; it is closed with this.

        Args:
            ring: where blocks for devices pass through that do not go past the host, if any do.
            places: the devices.
            taken: the transfer type of those blocks.
        """
        from fastserial.engines.gds.memory import offer  # not without a device

        self.ring = ring
        config = self._config
        refusal = "direct I/O is switched off" if config.never_direct else None
        self._straight, self._transfer = offer(
            config, taken, ring, self._engine, places, self._fd, os.O_RDONLY, refusal
        )

    def join(self, places: Collection[torch.device]) -> None:
        """Get ready for blocks for more devices, or later ones, after `stage_in`."""
        if self.ring is not None:
            self.ring.join(places)
        if self._straight is not None:
            self._straight.join(places)

    def expect(self, first: int, stop: int, nbytes: int) -> None:
        """Get ready for bytes that are read in the order of the file, until `expect_nothing`.

        Args:
            first, stop: the range of the file that they are in.
            nbytes: how many they are.
        """
        if self._direct_fd >= 0 or not self.takes_any_memory or nbytes <= self._config.small_file:
            return
        if (cached_fraction(self._fd, first, stop - first) or 0.0) >= MOSTLY_CACHED:
            return
        with contextlib.suppress(OSError):  # without /proc, or with no descriptor left
            while len(self._lanes) < min(self._config.queue_depth, LANES):
                self._lanes.append(linux.reopen(self._fd, os.O_RDONLY, self._lane_files))
        self._depth = len(self._lanes) or self._depth

    def expect_nothing(self) -> None:
        """Go back to blocks in any order; nothing is in flight."""
        self._depth = self._config.queue_depth
        self._lanes = []
        self._lane_files.close()

    @property
    def transfer(self) -> Transfer:
        """The transfer type taken for blocks to devices, and why."""
        return self._transfer if self._straight is None else self._straight.transfer

    @property
    def engine_name(self) -> str:
        return self._engine.name

    @property
    def takes_any_memory(self) -> bool:
        """Whether blocks may have `memory` of their own, and `pieces` if not read directly."""
        return self._engine.capabilities.any_memory

    @property
    def never_direct(self) -> bool:
        """Whether every block goes through the page cache."""
        return self._direct_fd < 0

    @property
    def best_size(self) -> int:
        """Bytes of the blocks that are read in the order of the file, after `expect`."""
        whole = self.never_direct and self.takes_any_memory and not self._lanes
        return SCATTERED_BLOCK if whole and self._straight is None else self._config.block_size

    def ordered(self, blocks: Iterable[Block | None]) -> Iterator[Block]:
        """Return blocks that come in the order of the file in the order to `put` them.

        None among them: nothing more is known now, what is held back must come.
        """
        if self._lanes:
            return in_turns(blocks, len(self._lanes))
        return (block for block in blocks if block is not None)

    @property
    def in_flight(self) -> int:
        """Blocks given that have not been reaped."""
        return self._in_flight + len(self._batch)

    def goes_direct(self, offset: int, length: int) -> bool:
        """Return whether these bytes are to be read directly: they are not in the page cache."""
        if self._direct_fd < 0 or self._refused:
            return False
        return not self._is_cached(offset, length)

    def goes_straight(self, device: torch.device, offset: int, length: int) -> bool:
        """Return whether these bytes are to be read to a device past the host."""
        straight = self._straight
        if straight is None or not straight.takes(device, offset, length):
            return False
        return not self._is_cached(offset, length)

    def _is_cached(self, offset: int, length: int) -> bool:
        """Return whether bytes are better read through the page cache: most are in it."""
        if self._config.direct is True:
            return False
        fraction = cached_fraction(self._fd, offset, length)
        return fraction is not None and fraction >= MOSTLY_CACHED

    def put(self, block: Block) -> None:
        """Queue a block; waits for others if the queue is full.

        Raises:
            OSError: a read failed.
            CorruptCheckpointError: the file is shorter than it was.
        """
        while self.in_flight >= self._depth:
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
            self._engine.submit(batch)

    def reap(self) -> None:
        """Wait for at least one block."""
        self.flush()
        for completion in self._engine.wait(1):
            self._in_flight -= 1
            self._complete(completion)

    def close(self) -> None:
        """Stop the engine and free the buffers, waiting only for reads under way. Idempotent."""
        hand = self._hand
        straight = self._straight
        finish(
            *([hand.close] if hand is not None else []),
            *([straight.close] if straight is not None else []),
            self._free,
        )

    def _free(self) -> None:
        self._batch = []
        self._in_flight = 0
        self._direct_fd = -1
        self._lane_files.close()
        self._files.close()
        self._owner = None
        if self.ring is not None:
            self.ring.close()

    # -- one block -----------------------------------------------------------------------------

    def _request(self, block: Block) -> Request:
        pieces, length = block.pieces, block.length
        move: Callable[[Request], int] | None = None
        fd = self._lanes[lane_of(block.offset, len(self._lanes))] if self._lanes else self._fd
        if pieces is not None:
            buffer = _NOTHING
        else:
            buffer = block.memory or self._staging_buffer()
            aligned = length - length % self.alignment
            direct = block.direct
            if direct is None:
                direct = self.goes_direct(block.offset, length)
            straight = self._straight
            if block.device is not None and straight is not None:
                move = straight.read(buffer, block.device, block.offset)
            elif direct and aligned and not (block.offset | buffer.address) % self.alignment:
                fd, length = self._direct_fd, aligned
        return Request(
            Op.READ, fd, block.offset, length, buffer,
            tag=block, finish=self._finish, pieces=pieces, move=move,
        )  # fmt: skip

    @property
    def _pool(self) -> BufferPool:
        return self._working.pool if self.ring is None else self.ring

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
        with trace.step("deliver"):
            block.deliver(request.view, request.buffer.address)

    def _complete(self, completion: Completion) -> None:
        request, error = completion.request, completion.error
        block: Block = request.tag
        direct = request.fd == self._direct_fd or request.move is not None
        if error is not None:
            self._recover(request, error, direct)
            direct = False
        if block.memory is None and block.pieces is None:
            self._pool.give(request.buffer)
        self._count(request, direct)
        if self._on_progress is not None:
            self._on_progress(block.length)

    def _recover(self, request: Request, error: BaseException, direct: bool) -> None:
        """Read a block through the page cache after direct I/O failed, or tell that it is lost."""
        fail = request.tag.fail
        # `done` is set: it was not the read that failed, but the delivery
        if not isinstance(error, OSError) or (request.times[2] and fail is None):
            raise error
        refused = direct and error.errno == errno.EINVAL
        if refused:
            self._refuse_direct()
        elif fail is None:
            raise error
        try:
            if not direct:
                raise error
            self._finish(request, 0)
        except OSError as lost:
            if fail is None:
                raise
            fail(lost)

    def _count(self, request: Request, direct: bool) -> None:
        counts, length = self.counts, request.tag.length
        if direct:
            counts.direct += length
        else:
            counts.cached += length
        queued, started, done = request.times
        if trace.listener is not None:
            trace.block(request.times)
        if done:
            counts.submit_seconds.append(started - queued)
            counts.complete_seconds.append(done - started)

    def _refuse_direct(self) -> None:
        """Go on through the page cache: the file system took the flag, but not the read."""
        self._refused = True
        if self.fallback is None:
            what = "direct I/O refused at the first read: Invalid argument"
            self.fallback = Reason(what, SEE_DOCTOR)
            _log.debug("%s; going on through the page cache", self.fallback)
