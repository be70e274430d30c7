"""Engine `deepspeed`: writes by DeepSpeed's libaio threads (`aio_handle`).

DeepSpeed never reads the result of its I/O events: a write that failed looks like one that worked.
A file system with holes shows the difference: a range that was reserved or skipped is a hole
(`lseek(SEEK_HOLE)`), and direct I/O turns it into data only when the device has taken it. So
DeepSpeed gets a block only where the file has none of its bytes yet, and when DeepSpeed is done
they must be there; else a plain call writes them again, and reports the error. Where nothing would
show whether bytes were moved (existing data, the page cache, reads), the engine `threads` moves
them.

A handle can only wait for all it was given, so there are two: one is filled while the other
writes, as FastPersist's double buffer does.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
from collections.abc import Callable, Sequence
from itertools import starmap
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

from fastserial.config.performance import PAGE
from fastserial.engines import Capabilities, Completion, Engine, Op, Request
from fastserial.engines.deepspeed.aio_op import AioSettings, borrow_handle, give_back, missing
from fastserial.engines.deepspeed.locked_memory import given_pool, may_lock, own_pool
from fastserial.engines.threads import ThreadsEngine, completed
from fastserial.errors import EngineError
from fastserial.files import linux
from fastserial.memory.buffers import Buffer, BufferPool

if TYPE_CHECKING:
    import torch

__all__ = ["DeepSpeedEngine", "is_blank", "is_written"]

_log = logging.getLogger("fastserial")


class _Lane:
    """One handle and what it was given since the last wait.

    `list.extend` records each call: no signal handler runs between the call and its record, so an
    interrupt never leaves a transfer without a wait, nor a wait without a transfer, which would end
    the process.
    """

    __slots__ = ("_given", "_waited", "handle", "pending")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.pending: list[tuple[Request, int]] = []  # with the bytes the handle moves
        self._given: list[int] = []
        self._waited: list[int] = []

    def start(self, call: Callable[..., int], *arguments: Any) -> bool:
        """Give the handle a transfer; return whether it took it."""
        self._given.extend(starmap(call, (arguments,)))
        return self._given[-1] == 0

    def wait(self) -> None:
        """Wait for all the handle was given."""
        if 0 in self._given and not self._waited:
            self._waited.extend(starmap(self.handle.wait, ((),)))
        self._given.clear()
        self._waited.clear()


class DeepSpeedEngine(Engine):
    """Blocks in locked memory, filled by the submitting thread and written by DeepSpeed's."""

    name: ClassVar[str] = "deepspeed"
    capabilities: ClassVar[Capabilities] = Capabilities(any_memory=False)

    def __init__(
        self,
        threads: int = 4,
        settings: AioSettings | None = None,
        memory: torch.Tensor | None = None,
        double_buffer: bool = True,
    ) -> None:
        """Make an engine.

        Args:
            threads: DeepSpeed's `intra_op_parallelism`, unless `settings` has it.
            settings: the arguments of the handle.
            memory: a locked or pinned byte tensor to use as buffers; by default one is allocated.
            double_buffer: fill one half of the buffers while the other half is written.
        """
        self._settings = settings or AioSettings(intra_op_parallelism=threads)
        super().__init__(self._settings.intra_op_parallelism)
        self._memory = memory
        self._lane_count = 2 if double_buffer else 1
        self._lanes: list[_Lane] = []
        self._turn = 0  # the lane that is being filled
        self._lane_depth = 1  # requests it takes
        self._tensors: dict[int, torch.Tensor] = {}
        self._done: list[Completion] = []
        self._plain = ThreadsEngine(self.threads)

    @classmethod
    def unavailable(cls) -> str | None:
        lacks = missing()
        if not lacks and not may_lock(PAGE):
            lacks = ["no memory may be locked: ulimit -l unlimited"]
        return "; ".join(lacks) or None

    def allocate(self, count: int, nbytes: int) -> BufferPool:
        """Return buffers in locked memory, fewer if `ulimit -l` does not allow `count`.

        Raises:
            EngineUnavailableError: not even one buffer of `nbytes` bytes may be locked.
        """
        handle, pool = self._open_lanes()[0].handle, None
        if self._memory is not None:
            pool = given_pool(handle, self._memory, count, nbytes)
        pool = pool or own_pool(handle, count, nbytes)
        self._tensors = pool.tensors
        return pool

    def _open_lanes(self) -> list[_Lane]:
        while len(self._lanes) < self._lane_count:
            self._lanes.append(_Lane(borrow_handle(self._settings)))
        return self._lanes

    def open(self, buffers: Sequence[Buffer], queue_depth: int) -> None:
        self._open_lanes()
        self._lane_depth = max(1, -(-queue_depth // self._lane_count))
        self._plain.open(buffers, queue_depth)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.op is Op.READ or request.buffer.address not in self._tensors:
                self._plain.submit([request])
                continue
            request.times[0] = perf_counter()
            try:
                if request.prepare is not None:
                    request.prepare(request)
                    request.prepare = None
                request.times[1] = perf_counter()
                if not self._start(request):
                    self._plain.submit([request])
            except Exception as error:
                self._done.append(Completion(request, 0, error))

    def _start(self, request: Request) -> bool:
        """Give the aligned part of a write to DeepSpeed, if the file will show that it is written.

        Raises:
            OSError: the descriptor is none.
        """
        unit = _unit(request.fd)
        if not unit or request.offset % unit:
            return False
        length = request.length - request.length % (unit * self.threads)
        if not length or not is_blank(request.fd, request.offset, length):
            return False
        lane = self._lanes[self._turn]
        if len(lane.pending) >= self._lane_depth:
            self._turn = (self._turn + 1) % len(self._lanes)
            lane = self._lanes[self._turn]
            if len(lane.pending) >= self._lane_depth:
                raise EngineError("more requests in flight than `open` was given")
        part = self._tensors[request.buffer.address][:length]
        taken = lane.start(lane.handle.async_pwrite, part, request.fd, request.offset)
        if taken:
            lane.pending.append((request, length))
        return taken

    def wait(self, minimum: int) -> list[Completion]:
        finished, self._done = self._done + self._plain.wait(0), []
        while len(finished) < minimum:
            # the lane after the one being filled is the oldest
            order = [*self._lanes[self._turn + 1 :], *self._lanes[: self._turn + 1]]
            lane = next((lane for lane in order if lane.pending), None)
            if lane is None:
                return finished + self._plain.wait(minimum - len(finished))
            lane.wait()
            pending, lane.pending = lane.pending, []
            finished += starmap(_end, pending)
        return finished

    def close(self) -> None:
        try:
            self._plain.close()
        finally:
            lanes, self._lanes = self._lanes, []
            for lane in lanes:
                lane.wait()
                give_back(self._settings, lane.handle)
            self._tensors = {}
            self._done.clear()


def _unit(fd: int) -> int:
    """Return the alignment of direct I/O on a descriptor (bytes), 0 if it is not direct."""
    if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
        return 0
    alignment = linux.direct_alignment(fd)
    # not finer than the file system's blocks: holes are seen by the block
    units = (alignment.memory, alignment.offset) if alignment else ()
    return math.lcm(PAGE, os.fstat(fd).st_blksize, *filter(None, units))


def _end(request: Request, length: int) -> Completion:
    """End a request of which DeepSpeed wrote `length` bytes, or lost them."""
    if not is_written(request.fd, request.offset, length):
        _log.warning("DeepSpeed lost a write of %d bytes; it is done again", length)
        length = 0
    return completed(request, length)


def is_blank(fd: int, offset: int, length: int) -> bool:
    """Return whether a region of a file holds no data yet, and the file system shows when it does.

    The file grows to hold the region: past the end of a file there are no holes.
    """
    end = offset + length
    try:
        if os.fstat(fd).st_size < end:
            os.ftruncate(fd, end)
        return os.lseek(fd, offset, os.SEEK_DATA) >= end
    except OSError as error:
        return error.errno == errno.ENXIO  # no data from `offset` to the end of the file


def is_written(fd: int, offset: int, length: int) -> bool:
    """Return whether every block of a region that was blank has been written."""
    try:
        return os.lseek(fd, offset, os.SEEK_HOLE) >= offset + length
    except OSError:
        return False
