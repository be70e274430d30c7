"""Engine `threads`: pread and pwrite on a few threads. Always there."""

from __future__ import annotations

import contextvars
import os
import queue
import threading
from collections.abc import Sequence
from time import perf_counter
from typing import ClassVar

from fastserial.engines.base import Capabilities, Completion, Engine, Op, Request
from fastserial.staging import Buffer

__all__ = ["ThreadsEngine", "transfer"]


def transfer(request: Request, done: int = 0) -> int:
    """Move a request's bytes with plain system calls and return how many are moved.

    The first `done` bytes are moved already. Goes on after a short transfer; a read ends early
    only at the end of the file.

    Raises:
        OSError: the system call failed.
    """
    view = request.view
    while done < request.length:
        rest = [view[done:]]
        if request.op is Op.WRITE:
            moved = os.pwritev(request.fd, rest, request.offset + done)
        else:
            moved = os.preadv(request.fd, rest, request.offset + done)
        if moved == 0:
            break
        done += moved
    return done


class ThreadsEngine(Engine):
    """A few threads that each prepare a block and then read or write it."""

    name: ClassVar[str] = "threads"
    capabilities: ClassVar[Capabilities] = Capabilities(parallel_prepare=True)

    def __init__(self, threads: int = 4) -> None:
        super().__init__(threads)
        self._work: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._in_flight = 0
        self._closing = False

    def open(self, buffers: Sequence[Buffer], queue_depth: int) -> None:
        count = max(1, min(self.threads, queue_depth))
        for index in range(count):
            # Each worker sees the caller's context variables, such as scoped options.
            context = contextvars.copy_context()
            worker = threading.Thread(
                target=context.run, args=(self._run,), name=f"fastserial-{index}", daemon=True
            )
            self._workers.append(worker)
            worker.start()

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.times[0] = perf_counter()
            self._in_flight += 1
            self._work.put(request)

    def wait(self, minimum: int) -> list[Completion]:
        finished: list[Completion] = []
        while self._in_flight:
            try:
                finished.append(self._done.get(block=len(finished) < minimum))
            except queue.Empty:
                break
            self._in_flight -= 1
        return finished

    def close(self) -> None:
        self._closing = True
        for _ in self._workers:
            self._work.put(None)
        interrupt: BaseException | None = None
        while self._workers:
            try:
                if self._workers[-1].ident is not None:  # None: its start was interrupted
                    self._workers[-1].join()
                self._workers.pop()
            except BaseException as error:  # a worker must not outlive buffers and descriptor
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def _run(self) -> None:
        while (request := self._work.get()) is not None:
            if not self._closing:
                self._done.put(self._serve(request))

    def _serve(self, request: Request) -> Completion:
        try:
            if request.prepare is not None:
                request.prepare(request)
            request.times[1] = perf_counter()
            moved = transfer(request)
            request.times[2] = perf_counter()
            if request.finish is not None:
                request.finish(request, moved)
            return Completion(request, moved)
        except BaseException as error:  # handed to the submitting thread
            return Completion(request, 0, error)
