"""Engine `aio`: Linux's native asynchronous I/O, by system call; needs no library.

A few threads fill blocks and hand each to the kernel (`io_submit`), so the device has work while
the next blocks are filled, however few threads there are. Blocks that are not for direct I/O are
moved by the kernel within that call.
"""

from __future__ import annotations

import contextvars
import ctypes
import errno
import os
import platform
import queue
import struct
import threading
from collections.abc import Sequence
from time import perf_counter
from typing import ClassVar

from fastserial.engines.base import Capabilities, Completion, Engine, Op, Request
from fastserial.engines.threads import transfer
from fastserial.staging import Buffer

__all__ = ["AioEngine"]

# io_setup, io_destroy, io_getevents, io_submit
_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
_IOCB = struct.Struct("<QIIHhIQQqQII")  # struct iocb of <linux/aio_abi.h>
_EVENT = struct.Struct("<QQqq")  # struct io_event
_OPCODES = {Op.READ: 0, Op.WRITE: 1}
_GLANCE = struct.pack("<qq", 0, 1_000_000)  # struct timespec: a millisecond


class _Context:
    """An aio context of the kernel."""

    def __init__(self, depth: int) -> None:
        """Make one for `depth` requests in flight.

        Raises:
            OSError: the kernel has no more (`fs.aio-max-nr`), or does not allow it.
        """
        numbers = _NUMBERS[platform.machine()]
        self._setup, self._destroy, self._getevents, self._submit = numbers
        self._call = ctypes.CDLL(None, use_errno=True).syscall
        self._call.restype = ctypes.c_long
        self._depth = depth
        handle = ctypes.c_ulong(0)
        self._checked(self._call(self._setup, ctypes.c_uint(depth), ctypes.byref(handle)))
        self._handle = handle

    def submit(self, key: int, request: Request) -> None:
        """Start a request; `reap` will return `key`.

        Raises:
            OSError: the kernel refuses it.
        """
        block = ctypes.create_string_buffer(
            _IOCB.pack(
                key, 0, 0, _OPCODES[request.op], 0, request.fd,
                request.buffer.address, request.length, request.offset, 0, 0, 0,
            ),
            _IOCB.size,
        )  # fmt: skip
        pointer = ctypes.pointer(block)
        while True:
            done = self._call(self._submit, self._handle, ctypes.c_long(1), ctypes.byref(pointer))
            if done >= 0 or ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
                self._checked(done)
                return

    def reap(self, forever: bool) -> list[tuple[int, int]]:
        """Wait for a request, at most a glance unless `forever`; return keys and results."""
        events = ctypes.create_string_buffer(_EVENT.size * self._depth)
        patience = None if forever else ctypes.create_string_buffer(_GLANCE, len(_GLANCE))
        count = self._call(
            self._getevents, self._handle, ctypes.c_long(1), ctypes.c_long(self._depth), events,
            patience,
        )  # fmt: skip
        if count < 0 and ctypes.get_errno() == errno.EINTR:
            return []
        self._checked(count)
        found = _EVENT.iter_unpack(events.raw[: count * _EVENT.size])
        return [(key, result) for key, _, result, _ in found]

    def close(self) -> None:
        """Give the context back; the kernel waits for what is in flight."""
        self._call(self._destroy, self._handle)

    def _checked(self, result: int) -> None:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


class AioEngine(Engine):
    """Threads that fill blocks, and the kernel that moves them."""

    name: ClassVar[str] = "aio"
    capabilities: ClassVar[Capabilities] = Capabilities(parallel_prepare=True)

    def __init__(self, threads: int = 2) -> None:
        super().__init__(threads)
        self._context: _Context | None = None
        self._work: queue.SimpleQueue[tuple[Request, int | None] | None] = queue.SimpleQueue()
        self._done: list[Completion] = []
        self._changed = threading.Condition()
        self._flying: dict[int, Request] = {}
        self._busy = 0  # requests that a worker has or will have
        self._workers: list[threading.Thread] = []
        self._closing = False

    @classmethod
    def unavailable(cls) -> str | None:
        if platform.machine() not in _NUMBERS:
            return f"not written for {platform.machine()}"
        try:
            _Context(1).close()
        except OSError as error:
            return f"{error.strerror} (io_setup; sysctl fs.aio-max-nr, or the container forbids it)"
        return None

    def open(self, buffers: Sequence[Buffer], queue_depth: int) -> None:
        self._context = _Context(queue_depth)
        # More would only wait for processors: the kernel waits for the device.
        count = max(1, min(self.threads, queue_depth, len(os.sched_getaffinity(0))))
        for index in range(count):
            # Each worker sees the caller's context variables, such as scoped options.
            context = contextvars.copy_context()
            worker = threading.Thread(
                target=context.run, args=(self._run,), name=f"fastserial-aio-{index}", daemon=True
            )
            self._workers.append(worker)
            worker.start()

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.times[0] = perf_counter()
            with self._changed:
                self._busy += 1
            self._work.put((request, None))

    def wait(self, minimum: int) -> list[Completion]:
        while True:
            with self._changed:
                while not (self._flying or len(self._done) >= minimum) and self._busy:
                    self._changed.wait()
                if len(self._done) >= minimum or not (self._flying or self._busy):
                    done, self._done = self._done, []
                    return done
                forever = not self._busy
            self._reap(forever)

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
        if self._context is not None:
            self._context.close()
            self._context = None
        if interrupt is not None:
            raise interrupt

    def _reap(self, forever: bool) -> None:
        if self._context is None:
            return
        for key, result in self._context.reap(forever):
            with self._changed:
                request = self._flying.pop(key)
                whole = result == request.length and request.finish is None
                if whole:
                    request.times[2] = perf_counter()
                    self._done.append(Completion(request, result))
                elif not self._closing:
                    self._busy += 1
            if not whole and not self._closing:
                self._work.put((request, result))

    def _run(self) -> None:
        while (task := self._work.get()) is not None:
            request, result = task
            completion: Completion | None = None
            if not self._closing:
                try:
                    if result is None:
                        self._start(request)
                    else:
                        completion = _end(request, result)
                except BaseException as error:  # handed to the submitting thread
                    completion = Completion(request, 0, error)
            with self._changed:
                self._busy -= 1
                if completion is not None:
                    self._done.append(completion)
                self._changed.notify_all()

    def _start(self, request: Request) -> None:
        if request.prepare is not None:
            request.prepare(request)
        request.times[1] = perf_counter()
        key = request.buffer.address
        with self._changed:
            self._flying[key] = request  # first: it may be done before `submit` returns
        try:
            if self._context is not None:
                self._context.submit(key, request)
        except BaseException:
            with self._changed:
                self._flying.pop(key, None)
            raise


def _end(request: Request, result: int) -> Completion:
    """Go on after a short transfer, and land what was read."""
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    moved = transfer(request, result) if result < request.length else result
    request.times[2] = perf_counter()
    if request.finish is not None:
        request.finish(request, moved)
    return Completion(request, moved)
