"""Engine `null`: prepares every block and moves nothing. Measures fastserial itself.

The benchmark passes the class; no option or variable names it, since it empties checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import ClassVar

from fastserial.engines import Capabilities, Completion, Engine, Request
from fastserial.memory.buffers import Buffer

__all__ = ["NullEngine"]


class NullEngine(Engine):
    """Completes every request at once. The file it leaves holds no data."""

    name: ClassVar[str] = "null"
    capabilities: ClassVar[Capabilities] = Capabilities(moves_data=False)

    def __init__(self, threads: int = 1) -> None:
        super().__init__(threads)
        self._done: list[Completion] = []

    def open(self, buffers: Sequence[Buffer], queue_depth: int) -> None:
        pass

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.times[0] = perf_counter()
            failed = request.prepared()
            request.times[1] = request.times[2] = perf_counter()
            self._done.append(failed or Completion(request, request.length))

    def wait(self, minimum: int) -> list[Completion]:
        finished, self._done = self._done, []
        return finished

    def close(self) -> None:
        self._done.clear()
