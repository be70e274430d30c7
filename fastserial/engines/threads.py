"""Engine `threads`: pread and pwrite on a few threads. Available everywhere."""

from __future__ import annotations

import contextlib
import contextvars
import os
import queue
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import ClassVar

from fastserial.config.performance import FEW_CORES
from fastserial.engines import Capabilities, Completion, Engine, Op, Request
from fastserial.errors import EngineError, FastserialError
from fastserial.files.linux import preadv
from fastserial.interrupts import Background, finish, ours
from fastserial.memory.buffers import Buffer


def transfer(request: Request, done: int = 0) -> int:
    """Move a request's bytes with plain system calls and return how many are moved.

    The first `done` bytes are moved already. Continues after a short transfer; a read ends early
    only at the end of the file.

    Raises:
        OSError: the system call failed.
    """
    while done < request.length:
        if request.op is Op.WRITE:
            moved = os.pwrite(request.fd, request.view[done:], request.offset + done)
        else:
            moved = preadv(request.fd, request.rest(done), request.offset + done)
        if moved == 0:
            break
        done += moved
    return done


def complete(request: Request, move: Callable[[Request], int]) -> Completion:
    """Prepare a request, if that is still to be done, move its bytes, and finish it.

    Args:
        request: the request.
        move: moves the bytes and returns how many; `Request.move` has precedence.

    Raises:
        BaseException: on the submitting thread also one that a signal handler raised.
    """
    failed = request.prepared()
    if failed is not None:
        return failed
    try:
        moved = (request.move or move)(request)
        request.moved = True
        if request.finish is not None:
            request.finish(request, moved)
        return Completion(request, moved)
    except ours(OSError, FastserialError) as error:
        return Completion(request, 0, error)


class ThreadsEngine(Engine):
    """A few threads that read and write blocks; the submitting thread where none can be started.

    Which thread prepares a block depends on the machine. With few cores it is the submitting
    thread, while the others wait for the device: two copies at a time would take the cores that
    kernel and device need (on 2 cores that cost 15 to 30 % of the speed of a save). With more
    cores each thread prepares the blocks that it writes.
    """

    name: ClassVar[str] = "threads"
    capabilities: ClassVar[Capabilities] = Capabilities(device_memory=True)

    def __init__(self, threads: int = 4, prepare_here: bool | None = None) -> None:
        """Use `threads` threads, 0: the submitting one only; `prepare_here`: that one prepares."""
        super().__init__(threads)
        if prepare_here is None:
            prepare_here = len(os.sched_getaffinity(0)) <= FEW_CORES
        self._prepare_here = prepare_here
        self._requests: _RequestsOrEnd = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        # If an interrupt skips `close`, the workers end once the engine is garbage: this reference
        # is put into the queue then.
        self._reference = weakref.ref(self, self._requests.put)
        self._workers = Background()
        self._move: Callable[[Request], int] = transfer  # what the workers call
        self._queue_depth = 1
        self._in_flight = 0

    def open(self, buffers: Sequence[Buffer], queue_depth: int) -> None:
        self._queue_depth = queue_depth

    def _start(self, op: Op) -> None:
        count = min(self.threads, self._queue_depth)
        if self._prepare_here and op is Op.WRITE:
            # The other blocks are prepared, or just written: neither side waits for the other.
            count = min(count, max(1, self._queue_depth // 2))
        for _ in range(count):
            # Each worker sees the caller's context variables, such as scoped options.
            run = contextvars.copy_context().run
            if not self._workers.start(run, _run, self._requests, self._move, self._reference):
                break

    def submit(self, requests: Sequence[Request]) -> None:
        alone = sys.is_finalizing()  # other threads no longer run
        if requests and not self._workers and not alone:
            self._start(requests[0].op)
        for request in requests:
            failed = request.prepared() if self._prepare_here else None
            self._in_flight += 1
            if failed is not None:
                self._done.put(failed)
            elif self._workers and not alone:
                self._requests.put(request)
            else:  # no thread can be started: slower, but torch needs none either
                self._done.put(complete(request, transfer))

    def wait(self, minimum: int) -> list[Completion]:
        finished: list[Completion] = []
        if self._in_flight and self._workers and sys.is_finalizing():
            raise EngineError("its threads were stopped: the interpreter is shutting down")
        while self._in_flight:
            try:
                finished.append(self._done.get(block=len(finished) < minimum))
            except queue.Empty:
                break
            self._in_flight -= 1
        return finished

    def close(self) -> None:
        # workers use the buffers and the descriptor
        finish(self._stop, self._workers.join, self._forget)

    def _forget(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:  # the tracebacks of errors lead to frames that refer to completions
                self._done.get_nowait().error = None

    def _stop(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._requests.get_nowait()  # requests that have not started
        self._requests.put(None)


# Requests. Anything else in the queue ends the worker that takes it.
_RequestsOrEnd = queue.SimpleQueue[object]


def _run(
    requests: _RequestsOrEnd,
    move: Callable[[Request], int],
    reference: weakref.ref[ThreadsEngine],
) -> None:
    """Complete requests until the queue yields something else, which is put back for other workers.

    A running worker holds no reference to its engine, so that an abandoned engine is freed.
    """
    while isinstance(request := requests.get(), Request):
        _serve(request, move, reference)
        request = None  # do not keep its memory while waiting for the next request
    requests.put(request)


def _serve(
    request: Request,
    move: Callable[[Request], int],
    reference: weakref.ref[ThreadsEngine],
) -> None:
    try:
        completion = complete(request, move)
    except BaseException as error:  # the submitting thread raises it
        completion = Completion(request, 0, error)
    engine = reference()
    if engine is not None:
        engine._done.put(completion)
