"""The last to refer to a pool is a thread of one of its engines: `python engine_pools.py FILE`.

It happens when a file is closed right after a read. Prints how many bytes were read.
"""

from __future__ import annotations

import os
import sys

from fastserial.config import Config
from fastserial.engines import Op, Request
from fastserial.loading.engine_pool import EnginePool
from fastserial.memory.buffers import BufferPool


def main(path: str) -> None:
    config = Config(threads=1, queue_depth=1)
    pool = EnginePool()
    opened = pool.take(config)
    engine = opened.engine
    pool.give(config, opened)
    last = [pool]
    del pool, opened
    fd = os.open(path, os.O_RDONLY)
    buffer = BufferPool(1, 4096).take()
    forget = lambda request, moved: last.clear()  # noqa: E731
    engine.submit([Request(Op.READ, fd, 0, 4096, buffer, finish=forget)])
    [completion] = engine.wait(1)
    print(completion.transferred)


main(sys.argv[1])
