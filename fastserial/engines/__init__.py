"""The interface of an I/O engine, and the choice of one.

An engine moves aligned blocks between staging buffers and file descriptors. It knows nothing of
containers or torch. Requests are submitted in batches and complete in any order:

    pool = engine.allocate(queue_depth, block_size)
    engine.open(pool.buffers, queue_depth)
    engine.submit([Request(...), ...])
    for completion in engine.wait(1): ...
    engine.close()

One engine object serves one file from one submitting thread. io_uring, libaio and cuFile fit behind
the same calls: `allocate` pins buffers, `open` sets up rings or registers buffers, `submit` gives
requests to the kernel, `wait` reaps completions.

An engine of your own needs no name: `install(engine=MyEngine)`.
"""

from __future__ import annotations

import abc
import enum
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fastserial.config import Config, refuse_variable
from fastserial.errors import EngineUnavailableError
from fastserial.interrupts import finish_after, ours
from fastserial.memory.buffers import Buffer, BufferPool


class Op(enum.Enum):
    """Direction of a request."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What engines differ in. All of them read and write any number of bytes at any offset.

    Attributes:
        any_memory: moves bytes from and to any memory, and reads into several pieces of it
            (`Request.pieces`); else only the buffers of its own `allocate`.
        device_memory: requests may move device memory that does not pass through the host
            (`Request.move`), several at once.
    """

    any_memory: bool = True
    device_memory: bool = False


@dataclass(slots=True)
class Request:
    """One transfer of `length` bytes at `offset` of the file behind descriptor `fd`.

    Attributes:
        prepare: fills the buffer before a write; called exactly once, on any thread. Requests are
            prepared in the order of submission: one may wait for an earlier one, not for a later
            one.
        tag: for the submitter; engines do not use it.
        moved: the transfer itself is over, without an error; engines set it before `finish`.
        finish: called with the bytes moved once they are, before the completion is reported, on
            any thread. An `OSError` or `FastserialError` in it ends the request; `submit` and
            `wait` may raise other errors, which may be a signal handler's.
        pieces: memory that a read fills, one piece after the other, instead of the buffer; only
            for engines with `any_memory`.
        move: moves the bytes, instead of the engine, and returns how many; called with the
            request, once, when it is prepared; only for engines with `device_memory`.
    """

    op: Op
    fd: int
    offset: int
    length: int
    buffer: Buffer
    prepare: Callable[[Request], None] | None = None
    tag: Any = None
    moved: bool = False
    finish: Callable[[Request, int], None] | None = None
    pieces: Sequence[memoryview] | None = None
    move: Callable[[Request], int] | None = None

    def prepared(self) -> Completion | None:
        """Call `prepare`, once; return a completion if that raised an exception, else None."""
        prepare, self.prepare = self.prepare, None
        if prepare is not None:
            try:
                prepare(self)
            except ours(Exception) as error:
                return Completion(self, 0, error)
        return None

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
            a read, and a failure in a write: an engine continues after a short write.
        error: what ended the request, or None.
    """

    request: Request
    transferred: int
    error: BaseException | None = None


class Engine(abc.ABC):
    """Moves blocks. The module's docstring has the order of calls.

    Attributes:
        name: as it is registered; reports show it as `engine`.
        capabilities: what it can do.
    """

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    def __init__(self, threads: int = 1) -> None:
        """Make an engine; `threads` is a hint for engines that use threads."""
        self.threads = threads

    @classmethod
    def unavailable(cls) -> str | None:
        """Return why the engine cannot run here and what to install, or None if it can."""
        return None

    def allocate(self, count: int, nbytes: int) -> BufferPool:
        """Return up to `count` buffers of `nbytes` bytes each, in memory that suits this engine."""
        return BufferPool(count, nbytes)

    @abc.abstractmethod
    def open(self, buffers: Sequence[Buffer], queue_depth: int) -> None:
        """Prepare for up to `queue_depth` requests in flight, on these buffers."""

    @abc.abstractmethod
    def submit(self, requests: Sequence[Request]) -> None:
        """Queue a batch. Returns at once, or after preparing if the engine has no threads."""

    @abc.abstractmethod
    def wait(self, minimum: int) -> list[Completion]:
        """Return finished requests, at least `minimum` unless fewer are in flight."""

    @abc.abstractmethod
    def close(self) -> None:
        """Drop requests that have not started, wait for the others, free resources. Idempotent."""


_BUILTIN = {
    "threads": "fastserial.engines.threads:ThreadsEngine",
    "io_uring": "fastserial.engines.io_uring:IoUringEngine",
    "deepspeed": "fastserial.engines.deepspeed.engine:DeepSpeedEngine",
}
EngineFactory = Callable[[int], Engine]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Whether an engine can run here: `missing` is what prevents it, or None."""

    name: str
    missing: str | None


def names() -> list[str]:
    """Return the names of the engines that come with fastserial."""
    return list(_BUILTIN)


def load(name: str) -> type[Engine]:
    """Return the class of an engine.

    Raises:
        EngineUnavailableError: there is no such engine, or it cannot run here; with the reason.
    """
    if name not in _BUILTIN:
        raise EngineUnavailableError(
            f"no I/O engine {name!r}; there are: {', '.join(_BUILTIN)}. An engine of your own is "
            "given as its class, engine=MyEngine, not by a name"
        )
    module, _, attribute = _BUILTIN[name].partition(":")
    found: type[Engine] = getattr(importlib.import_module(module), attribute)
    missing = found.unavailable()
    if missing is not None:
        raise EngineUnavailableError(f"engine {name!r} cannot run here: {missing}")
    return found


def capabilities_of(make: EngineFactory) -> Capabilities:
    """Return the capabilities of what a factory makes: an engine's class or a `partial` of it.

    For other functions the default capabilities are assumed.
    """
    found = getattr(getattr(make, "func", make), "capabilities", None)
    return found if isinstance(found, Capabilities) else Capabilities()


def factory_of(engine: str | EngineFactory) -> EngineFactory:
    """Return what makes an engine, which may be given by its name.

    If one that the environment names cannot run here, that is a warning, and the default engine is
    made.

    Raises:
        EngineUnavailableError: there is no such engine, or it cannot run here; with the reason.
    """
    if not isinstance(engine, str):
        return engine
    try:
        return load(engine)
    except ours(EngineUnavailableError) as error:
        if not refuse_variable("engine", engine, str(error)):
            raise
        return factory_of(Config().engine)


def create(engine: str | EngineFactory, threads: int) -> Engine:
    """Return a new engine, as `factory_of`.

    Raises:
        EngineUnavailableError: it cannot run here; with the reason.
    """
    return factory_of(engine)(threads)


def start(engine: Engine, count: int, nbytes: int, pool: BufferPool | None = None) -> BufferPool:
    """Open a new engine on staging buffers and return them. On failure, both are closed.

    Args:
        count, nbytes: up to so many buffers of so many bytes.
        pool: buffers to use instead.

    Raises:
        MemoryError, OSError: there is no memory or no descriptor left.
    """
    closers = [engine.close]
    try:
        pool = pool or engine.allocate(count, nbytes)
        closers.append(pool.close)
        engine.open(pool.buffers, len(pool.buffers))
    except BaseException as error:
        finish_after(error, *closers)
        raise
    return pool


def survey() -> list[EngineStatus]:
    """Return, for every known engine, whether it can run here and if not, why."""
    found: list[EngineStatus] = []
    for name in names():
        try:
            load(name)
            found.append(EngineStatus(name, None))
        except ours(EngineUnavailableError) as error:
            found.append(EngineStatus(name, str(error)))
    return found
