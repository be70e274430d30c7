"""Transfers to try an engine with: requests, and files opened with and without direct I/O."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest

from fastserial.engines import Completion, Engine, Op, Request
from fastserial.errors import EngineError
from fastserial.memory.buffers import Buffer, BufferPool

BLOCK = 64 * 1024
DEPTH = 4
FLAGS = {"buffered": 0, "direct": os.O_DIRECT}


def drive(engine: Engine, pool: BufferPool, requests: list[Request]) -> list[Completion]:
    """Move all requests, as many at a time as the pool has buffers, and return what came back.

    A request made with `buffer=None` gets one from the pool; a read's bytes go to its `tag`.
    """
    finished: list[Completion] = []

    def reap() -> None:
        for completion in engine.wait(1):
            request = completion.request
            if request.op is Op.READ:
                request.tag = bytes(request.view[: completion.transferred])
            finished.append(completion)
            pool.give(request.buffer)

    waiting = list(requests)
    while waiting:
        batch = waiting[: pool.free]
        del waiting[: len(batch)]
        for request in batch:
            request.buffer = pool.take()
        engine.submit(batch)
        reap()
    while len(finished) < len(requests):
        reap()
    return finished


def write(fd: int, offset: int, data: bytes) -> Request:
    """Return a write of `data`, which `prepare` puts into the buffer."""

    def prepare(request: Request) -> None:
        request.view[:] = data

    return Request(Op.WRITE, fd, offset, len(data), no_buffer(), prepare)


def read(fd: int, offset: int, length: int) -> Request:
    """Return a read; `drive` puts the bytes into its `tag`."""
    return Request(Op.READ, fd, offset, length, no_buffer())


def no_buffer() -> Any:
    """Return what stands for a buffer until `drive` gives one."""
    return None


class Opener:
    """Opens files of a folder, all with or without O_DIRECT, and closes them."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self._flags = FLAGS[kind]
        self._open: list[int] = []

    def __call__(self, name: str, mode: int = os.O_RDWR | os.O_CREAT) -> int:
        """Open a file, with O_DIRECT if that is what this opener does."""
        try:
            fd = os.open(self.folder / name, mode | self._flags)
        except OSError as error:
            if self._flags and error.errno == errno.EINVAL:
                pytest.skip(f"no direct I/O in {self.folder}")
            raise
        self._open.append(fd)
        return fd

    def buffered(self, name: str) -> int:
        """Open a file without O_DIRECT."""
        fd = os.open(self.folder / name, os.O_RDWR | os.O_CREAT)
        self._open.append(fd)
        return fd

    def create(self, name: str, data: bytes) -> None:
        """Put a file with these bytes on the disk."""
        fd = self.buffered(name)
        os.pwrite(fd, data, 0)
        os.fsync(fd)

    def content(self, name: str) -> bytes:
        """Return the bytes of a file."""
        return (self.folder / name).read_bytes()

    def close(self) -> None:
        """Close all descriptors."""
        while self._open:
            os.close(self._open.pop())


def noise(length: int, seed: int = 0) -> bytes:
    """Return random bytes, the same for the same seed."""
    return random.Random(seed).randbytes(length)


def into(buffer: Buffer, request: Request) -> Request:
    """Return the request with this buffer."""
    request.buffer = buffer
    return request


def wait_for(engine: Engine, count: int) -> list[Completion]:
    """Return `count` completions.

    Raises:
        EngineError: the engine has nothing in flight before that.
    """
    finished: list[Completion] = []
    while len(finished) < count:
        more = engine.wait(1)
        if not more:
            raise EngineError(f"only {len(finished)} of {count} requests came back")
        finished += more
    return finished
