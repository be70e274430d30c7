"""The interface of an I/O engine.

An engine moves aligned blocks between staging buffers and file descriptors. It knows nothing of
containers or torch. Requests are submitted in batches and complete in any order:

    pool = engine.allocate(queue_depth, block_size)
    engine.open(pool.buffers, queue_depth)
    engine.submit([Request(...), ...])
    for completion in engine.wait(1): ...
    engine.close()

One engine object serves one file from one submitting thread. io_uring, libaio and cuFile fit
behind the same calls: `allocate` is where buffers are pinned, `open` where rings are set up or
buffers registered, `submit` gives requests to the kernel, `wait` reaps completions.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fastserial.memory.buffers import Buffer, BufferPool

__all__ = ["Capabilities", "Completion", "Engine", "Op", "Request"]


class Op(enum.Enum):
    """Direction of a request."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What engines differ in. All read and write, at any offset and of any length.

    Attributes:
        moves_data: the bytes really reach the file (`null` says no).
        any_memory: moves bytes from and to any memory, and reads into several pieces of it
            (`Request.pieces`); else only the buffers of its own `allocate`.
        device_memory: lets requests move device memory that does not pass through the host
            (`Request.move`), several at once.
    """

    moves_data: bool = True
    any_memory: bool = True
    device_memory: bool = False


@dataclass(slots=True)
class Request:
    """One transfer of `length` bytes at `offset` of the file behind descriptor `fd`.

    Attributes:
        prepare: fills the buffer before a write; called exactly once, on any thread. Requests are
            prepared in the order of submission: one may wait for an earlier one, never for a later.
        tag: the submitter's own; engines leave it alone.
        times: seconds on `time.perf_counter`: queued, started, done (engines fill them in).
        finish: called with the bytes moved once they are, before the completion is reported, on
            any thread. An error in it ends the request.
        pieces: where the bytes of a read go, one after the other, instead of the buffer; only for
            engines with `any_memory`.
        move: moves the bytes, in place of the engine, and returns how many; called with the
            request, once, when it is prepared; only for engines with `device_memory`.
    """

    op: Op
    fd: int
    offset: int
    length: int
    buffer: Buffer
    prepare: Callable[[Request], None] | None = None
    tag: Any = None
    times: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    finish: Callable[[Request, int], None] | None = None
    pieces: Sequence[memoryview] | None = None
    move: Callable[[Request], int] | None = None

    @property
    def view(self) -> memoryview:
        """The part of the buffer that is transferred."""
        return self.buffer.view[: self.length]

    def rest(self, done: int) -> Sequence[memoryview]:
        """Return the memory of what is not transferred, after `done` bytes."""
        if self.pieces is None:
            return [self.view[done:]]
        if not done:
            return self.pieces
        found: list[memoryview] = []
        for piece in self.pieces:
            if done < len(piece):
                found.append(piece[done:])
            done = max(0, done - len(piece))
        return found


@dataclass(slots=True)
class Completion:
    """A finished request.

    Attributes:
        transferred: bytes moved. Fewer than `length` without an error means the end of the file in
            a read, and a failure in a write: an engine goes on after a short write.
        error: what ended the request, or None.
    """

    request: Request
    transferred: int
    error: BaseException | None = None


class Engine(abc.ABC):
    """Moves blocks. See the module's text for the order of calls.

    Attributes:
        name: as it is registered; reports show it as `engine`.
        capabilities: what it can do.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    def __init__(self, threads: int = 1) -> None:
        """Make an engine; `threads` is a hint for engines that have threads of their own."""
        self.threads = threads

    @classmethod
    def unavailable(cls) -> str | None:
        """Return why the engine cannot run here and what to install, or None if it can."""
        return None

    def allocate(self, count: int, nbytes: int) -> BufferPool:
        """Return up to `count` buffers of `nbytes` bytes each, in memory this engine likes best."""
        return BufferPool(count, nbytes)

    @abc.abstractmethod
    def open(self, buffers: Sequence[Buffer], queue_depth: int) -> None:
        """Get ready for up to `queue_depth` requests in flight, on these buffers."""

    @abc.abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Queue a batch. Returns at once, or after preparing if the engine has no threads."""

    @abc.abstractmethod
    def wait(self, minimum: int) -> list[Completion]:
        """Return finished requests, at least `minimum` unless fewer are in flight."""

    @abc.abstractmethod
    def close(self) -> None:
        """Drop what has not started, wait for what has, and free resources. Idempotent."""
