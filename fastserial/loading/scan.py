"""Reading every byte of a file once, at the speed of the disk, on several threads.

A block that is in the page cache is read from there; any other by direct I/O, which leaves the
cache alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from fastserial.config import Config
from fastserial.engines.base import Completion, Op, Request
from fastserial.engines.threads import ThreadsEngine
from fastserial.files import linux
from fastserial.files.page_cache import cached_bytes
from fastserial.memory.buffers import BufferPool

__all__ = ["scan"]

_MOSTLY = 0.5  # a block of which this part is cached is read through the cache
_PAGE = 4096

Visit = Callable[[int, memoryview], None]
Fail = Callable[[int, int, OSError], None]


def scan(fd: int, start: int, end: int, visit: Visit, fail: Fail, config: Config) -> None:
    """Read bytes [start, end) of a file in blocks.

    Args:
        fd: a descriptor of the file.
        start, end: bytes.
        visit: called with the offset and the bytes of each block, in any order, on several
            threads at once. The bytes are there during the call only.
        fail: called with offset, length and error of a block that could not be read.
        config: block size, queue depth and number of threads.

    Raises:
        Exception: whatever `visit` raises.
    """
    scanner = _Scanner(fd, start, end, visit, fail, config)
    try:
        scanner.run()
    finally:
        scanner.close()


class _Scanner:
    def __init__(
        self, fd: int, start: int, end: int, visit: Visit, fail: Fail, config: Config
    ) -> None:
        self._fd = fd
        self._end = end
        self._visit = visit
        self._fail = fail
        self._size = config.block_size
        self._offset = start - start % self._size
        self._start = start
        blocks = max(1, -(-(end - self._offset) // self._size))
        depth = min(config.queue_depth, blocks)
        self._direct_fd = _open_direct(fd, self._size) if config.direct is not False else -1
        self._pool = BufferPool(depth, self._size)
        self._engine = ThreadsEngine(min(config.threads, depth))
        self._engine.open(self._pool.buffers, depth)
        self._in_flight = 0

    def run(self) -> None:
        while self._offset < self._end or self._in_flight:
            while self._offset < self._end and self._pool.free:
                self._submit()
            for completion in self._engine.wait(1):
                self._in_flight -= 1
                self._pool.give(completion.request.buffer)
                self._check(completion)

    def close(self) -> None:
        self._engine.close()
        self._pool.close()
        if self._direct_fd >= 0:
            os.close(self._direct_fd)

    def _submit(self) -> None:
        offset = self._offset
        length = min(self._size, self._end - offset)
        self._offset += length
        fd = self._fd
        if self._direct_fd >= 0 and length % _PAGE == 0 and not _is_cached(fd, offset, length):
            fd = self._direct_fd
        buffer = self._pool.take()
        self._in_flight += 1
        self._engine.submit([Request(Op.READ, fd, offset, length, buffer, finish=self._finish)])

    def _finish(self, request: Request, moved: int) -> None:
        if moved < request.length:
            # Direct I/O may stop where the page cache would not; a shrunken file ends here.
            moved += _read_rest(self._fd, request.view[moved:], request.offset + moved)
        skip = max(0, self._start - request.offset)
        if moved > skip:
            self._visit(request.offset + skip, request.view[skip:moved])

    def _check(self, completion: Completion) -> None:
        request, error = completion.request, completion.error
        if error is None:
            return
        if not isinstance(error, OSError):
            raise error
        if request.fd == self._direct_fd:  # perhaps only direct I/O fails; try the page cache
            buffer = self._pool.take()
            self._in_flight += 1
            again = Request(
                Op.READ, self._fd, request.offset, request.length, buffer, finish=self._finish
            )
            self._engine.submit([again])
            return
        self._fail(request.offset, request.length, error)


def _open_direct(fd: int, block_size: int) -> int:
    """Return a descriptor for direct I/O on the same file, or -1."""
    alignment = linux.direct_alignment(fd)
    if alignment is None or block_size % alignment.offset or _PAGE % alignment.memory:
        return -1
    try:
        return linux.reopen(fd, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return -1


def _is_cached(fd: int, offset: int, length: int) -> bool:
    cached = cached_bytes(fd, offset, length)
    return cached is not None and cached >= length * _MOSTLY


def _read_rest(fd: int, view: memoryview, offset: int) -> int:
    done = 0
    while done < len(view):
        moved = os.preadv(fd, [view[done:]], offset + done)
        if moved == 0:
            break
        done += moved
    return done
