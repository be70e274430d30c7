"""The last to refer to a crew is a thread of one of its engines: `python crews.py FILE`.

It happens when a file is closed right after a read. Prints how many bytes were read.
"""

from __future__ import annotations

import os
import sys

from fastserial.config import Config
from fastserial.engines import Op, Request
from fastserial.loading.crew import Crew
from fastserial.memory.buffers import BufferPool


def main(path: str) -> None:
    config = Config(threads=1, queue_depth=1)
    crew = Crew()
    hand = crew.take(config)
    engine = hand.engine
    crew.give(config, hand)
    last = [crew]
    del crew, hand
    fd = os.open(path, os.O_RDONLY)
    buffer = BufferPool(1, 4096).take()
    forget = lambda request, moved: last.clear()  # noqa: E731
    engine.submit([Request(Op.READ, fd, 0, 4096, buffer, finish=forget)])
    [completion] = engine.wait(1)
    print(completion.transferred)


main(sys.argv[1])
