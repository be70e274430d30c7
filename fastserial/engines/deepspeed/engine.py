"""Engine `deepspeed`: DeepSpeed's libaio threads (`aio_handle`), with proof of each transfer.

DeepSpeed never reads the result of its I/O events: a write that failed looks like one that
worked. So a block goes to it only where the file system or the buffer will show afterwards whether
it was moved (`proof`); what is not shown to have been moved is moved again with a plain system
call, which says why. Blocks that cannot be proven or are not aligned go by plain calls at once.

A handle can only wait for all it was given, so there are two: one is filled while the other
writes, as FastPersist's double buffer does.
"""

from __future__ import annotations

import contextvars
import fcntl
import logging
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import starmap
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from fastserial.config.performance import PAGE
from fastserial.engines.base import Capabilities, Completion, Engine, Op, Request
from fastserial.engines.deepspeed.aio_op import (
    AioSettings,
    borrow_handle,
    give_back,
    lockable,
    missing,
)
from fastserial.engines.deepspeed.locked_memory import LockedPool, given_pool, own_pool
from fastserial.engines.deepspeed.transfer_proof import ReadMarks, is_blank, is_written
from fastserial.engines.threads import completed
from fastserial.errors import EngineError
from fastserial.files import linux
from fastserial.memory.buffers import Buffer, BufferPool

if TYPE_CHECKING:
    import torch

__all__ = ["DeepSpeedEngine"]

_log = logging.getLogger("fastserial")
_Result = TypeVar("_Result")


class _Lane:
    """One handle and what it was given since the last wait.

    `list.extend` notes each call: no signal handler runs between the call and its note, so an
    interrupt never leaves a transfer that nobody waits for, nor a wait for none, which would end
    the process.
    """

    __slots__ = ("_given", "_waited", "handle", "pending")

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.pending: list[tuple[Request, int]] = []  # with the bytes the handle moves
        self._given: list[int] = []
        self._waited: list[int] = []

    def start(self, call: Callable[..., int], *arguments: Any) -> bool:
        """Give the handle a transfer; tell whether it took it."""
        self._given.extend(starmap(call, (arguments,)))
        return self._given[-1] == 0

    def wait(self) -> None:
        """Wait for all the handle was given."""
        if 0 in self._given and not self._waited:
            self._waited.extend(starmap(self.handle.wait, ((),)))
        self._given.clear()
        self._waited.clear()


class DeepSpeedEngine(Engine):
    """Blocks in locked memory, moved by DeepSpeed's threads."""

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
            threads: DeepSpeed's `intra_op_parallelism`, unless `settings` say it.
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
        self._room = 1  # requests it takes
        self._pool: LockedPool | None = None
        self._tensors: dict[int, torch.Tensor] = {}
        self._units: dict[int, int] = {}
        self._marks = ReadMarks()
        self._done: list[Completion] = []
        self._plain: list[Future[Completion]] = []
        self._helpers: ThreadPoolExecutor | None = None
        self.repaired = 0  # transfers that DeepSpeed lost

    @classmethod
    def unavailable(cls) -> str | None:
        lacks = missing()
        if not lacks and lockable(PAGE) < PAGE:
            lacks = ["no memory may be locked: ulimit -l unlimited"]
        return "; ".join(lacks) or None

    # -- memory --------------------------------------------------------------------------------

    def allocate(self, count: int, nbytes: int) -> BufferPool:
        """Return buffers in locked memory, fewer if `ulimit -l` does not allow `count`.

        Raises:
            EngineUnavailableError: not even one buffer of `nbytes` bytes may be locked.
        """
        handle, pool = self._open_lanes()[0].handle, None
        if self._memory is not None:
            pool = given_pool(handle, self._memory, count, nbytes)
        self._pool = pool or own_pool(handle, count, nbytes)
        return self._pool

    def _open_lanes(self) -> list[_Lane]:
        while len(self._lanes) < self._lane_count:
            self._lanes.append(_Lane(borrow_handle(self._settings)))
        return self._lanes

    # -- transfers -----------------------------------------------------------------------------

    def open(self, buffers: Sequence[Buffer], queue_depth: int) -> None:
        self._open_lanes()
        self._helpers = ThreadPoolExecutor(max(1, min(self.threads, queue_depth)), "fastserial")
        self._room = max(1, -(-queue_depth // self._lane_count))
        pool = self._pool
        if pool is not None and buffers is pool.buffers:
            self._tensors = {buffer.address: pool.tensor_of(buffer) for buffer in buffers}
        # Buffers from elsewhere are not locked: DeepSpeed would copy them to memory that is.

    def submit(self, requests: Sequence[Request]) -> None:
        """Prepare a batch on a few threads, and start each request when its turn comes."""
        for request, prepared in [(request, self._prepare(request)) for request in requests]:
            try:
                if prepared is not None:
                    prepared.result()
                request.times[1] = perf_counter()
                if not self._start(request):
                    self._plain.append(self._run(completed, request, 0))
            except Exception as error:  # handed to whoever waits
                self._done.append(Completion(request, 0, error))

    def _prepare(self, request: Request) -> Future[None] | None:
        request.times[0] = perf_counter()
        return None if request.prepare is None else self._run(request.prepare, request)

    def _run(self, function: Callable[..., _Result], *arguments: Any) -> Future[_Result]:
        """Call a function on one of our threads."""
        if self._helpers is None:
            raise EngineError("the engine is not open")
        # each task sees the caller's context variables, such as scoped options
        context = contextvars.copy_context()
        return self._helpers.submit(context.run, function, *arguments)

    def _start(self, request: Request) -> bool:
        """Give what is aligned of a request to DeepSpeed, if it can be proven afterwards."""
        tensor = self._tensors.get(request.buffer.address)
        unit = self._unit(request.fd)
        if tensor is None or not unit or request.offset % unit:
            return False
        length = request.length
        if request.op is Op.READ:
            length = min(length, os.fstat(request.fd).st_size - request.offset)
        length -= length % (unit * self._settings.intra_op_parallelism)
        if length <= 0:
            return False
        lane = self._next_lane()
        handle, part = lane.handle, tensor[:length]
        if request.op is Op.READ:
            self._marks.put(part)
            # DeepSpeed reads by name only
            name = f"/proc/self/fd/{request.fd}"
            taken = lane.start(handle.async_pread, part, name, request.offset)
        elif is_blank(request.fd, request.offset, length):
            taken = lane.start(handle.async_pwrite, part, request.fd, request.offset)
        else:
            taken = False
        if taken:
            lane.pending.append((request, length))
        return taken

    def _unit(self, fd: int) -> int:
        """Return the alignment of direct I/O on a descriptor (bytes), 0 if it is not direct."""
        unit = self._units.get(fd)
        if unit is None:
            unit = 0
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                alignment = linux.direct_alignment(fd)
                # not finer than the file system's blocks: holes are seen by the block
                units = (alignment.memory, alignment.offset) if alignment else ()
                unit = math.lcm(PAGE, os.fstat(fd).st_blksize, *filter(None, units))
            self._units[fd] = unit
        return unit

    def _next_lane(self) -> _Lane:
        lane = self._lanes[self._turn]
        if len(lane.pending) >= self._room:
            self._turn = (self._turn + 1) % len(self._lanes)
            lane = self._lanes[self._turn]
            if len(lane.pending) >= self._room:
                raise EngineError("more requests in flight than `open` was given")
        return lane

    def wait(self, minimum: int) -> list[Completion]:
        finished, self._done = self._done, []
        while self._plain and (self._plain[0].done() or len(finished) < minimum):
            finished.append(self._plain.pop(0).result())
        while len(finished) < minimum:
            # the lane after the one being filled is the oldest
            order = [*self._lanes[self._turn + 1 :], *self._lanes[: self._turn + 1]]
            lane = next((lane for lane in order if lane.pending), None)
            if lane is None:
                break
            finished += self._reap(lane)
        return finished

    def _reap(self, lane: _Lane) -> list[Completion]:
        lane.wait()
        pending, lane.pending = lane.pending, []
        ends = [self._run(self._check, request, length) for request, length in pending]
        return [end.result() for end in ends]

    def _check(self, request: Request, length: int) -> Completion:
        """End a request of which DeepSpeed moved `length` bytes, or lost them."""
        if not self._moved(request, length):
            self.repaired += 1
            what = request.op.value
            _log.warning("DeepSpeed lost a %s of %d bytes; it is done again", what, length)
            length = 0
        return completed(request, length)

    def _moved(self, request: Request, length: int) -> bool:
        if request.op is Op.WRITE:
            return is_written(request.fd, request.offset, length)
        part = self._tensors[request.buffer.address][:length]
        return not self._marks.left(part)

    def close(self) -> None:
        try:
            if self._helpers is not None:
                self._helpers.shutdown(cancel_futures=True)
        finally:
            lanes, self._lanes = self._lanes, []
            for lane in lanes:
                lane.wait()
                give_back(self._settings, lane.handle)
            self._tensors = {}
            self._done.clear()
            self._plain.clear()
