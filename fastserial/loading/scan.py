"""Reading every byte of a file once, at the speed of the disk.

A block that is in the page cache is read from there; any other by direct I/O, which leaves the
cache alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fastserial.config import Config
from fastserial.errors import CorruptCheckpointError
from fastserial.loading.pump import STAGED, Block, Pump

__all__ = ["scan"]


def scan(
    fd: int,
    start: int,
    end: int,
    visit: Callable[[int, memoryview], None],
    fail: Callable[[int, int, OSError], None],
    config: Config,
) -> None:
    """Read bytes [start, end) of a file in blocks. A file that ends before is read to its end.

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
    size, end = config.block_size, min(end, os.fstat(fd).st_size)
    first = start - start % size
    depth = max(1, min(config.queue_depth, -(-(end - first) // size)))
    config = replace(
        config,
        engine="threads",  # any file can be verified, whatever saves are tried with
        queue_depth=depth,
        threads=min(config.threads, depth),
        cache="drop",
        small_file=0,
    )

    def block(offset: int) -> Block:
        def deliver(view: memoryview, _: int) -> None:
            skip = max(0, start - offset)
            if len(view) > skip:
                visit(offset + skip, view[skip:])

        length = min(size, end - offset)
        direct = pump.policy.goes_direct(offset, length)
        lost = partial(fail, offset, length)
        return Block(offset, length, deliver, STAGED, direct, lost)

    pump = Pump(fd, end, config)
    try:
        with contextlib.suppress(CorruptCheckpointError):  # it became shorter
            pump.read(map(block, range(first, end, size)))
    finally:
        pump.close()
