"""I/O engines, and the choice among them.

Third parties add one with the entry point group `fastserial.engines` (name = "module:Class").
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points

from fastserial.engines.base import Capabilities, Completion, Engine, Op, Request
from fastserial.errors import EngineUnavailableError
from fastserial.interrupts import finish
from fastserial.memory.buffers import Buffer, BufferPool

__all__ = [
    "Buffer",
    "BufferPool",
    "Capabilities",
    "Completion",
    "Engine",
    "EngineFactory",
    "EngineStatus",
    "Op",
    "Request",
    "capabilities_of",
    "create",
    "load",
    "names",
    "start",
    "survey",
]

_BUILTIN = {
    "threads": "fastserial.engines.threads:ThreadsEngine",
    "io_uring": "fastserial.engines.io_uring:IoUringEngine",
    "deepspeed": "fastserial.engines.deepspeed.engine:DeepSpeedEngine",
}
_GROUP = "fastserial.engines"
EngineFactory = Callable[[int], Engine]


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Whether an engine can run here: `missing` says what keeps it from it, or is None."""

    name: str
    missing: str | None


def names() -> list[str]:
    """Return the names of all known engines."""
    return [*_BUILTIN, *(e.name for e in entry_points(group=_GROUP) if e.name not in _BUILTIN)]


def load(name: str) -> type[Engine]:
    """Return the class of an engine.

    Raises:
        EngineUnavailableError: there is no such engine, or it cannot run here; says why.
    """
    try:
        if name in _BUILTIN:
            module, _, attribute = _BUILTIN[name].partition(":")
            found: type[Engine] = getattr(importlib.import_module(module), attribute)
        else:
            entry = next((e for e in entry_points(group=_GROUP) if e.name == name), None)
            if entry is None:
                raise EngineUnavailableError(
                    f"no I/O engine {name!r}; there are: {', '.join(names())}. Is the package "
                    f"installed that names it in the entry point group `{_GROUP}`?"
                )
            found = entry.load()
        missing = found.unavailable()
    except ImportError as error:
        if isinstance(error, EngineUnavailableError):
            raise
        raise EngineUnavailableError(f"engine {name!r} cannot be imported: {error}") from error
    if not found.capabilities.moves_data:
        raise EngineUnavailableError(f"engine {name!r} writes no data")
    if missing is not None:
        raise EngineUnavailableError(f"engine {name!r} cannot run here: {missing}")
    return found


def capabilities_of(make: EngineFactory) -> Capabilities:
    """Return what an engine can do, of what makes it: its class or a `partial` of it.

    Of other functions the usual is assumed.
    """
    found = getattr(getattr(make, "func", make), "capabilities", None)
    return found if isinstance(found, Capabilities) else Capabilities()


def create(engine: str | EngineFactory, threads: int) -> Engine:
    """Return a new engine, by name or from what makes one.

    Raises:
        EngineUnavailableError: it cannot run here; the message says why.
    """
    return load(engine)(threads) if isinstance(engine, str) else engine(threads)


def start(engine: Engine, count: int, nbytes: int, pool: BufferPool | None = None) -> BufferPool:
    """Open a new engine on staging buffers, which are returned. If that fails, all is closed.

    Args:
        count, nbytes: up to so many buffers of so many bytes.
        pool: buffers to use instead.

    Raises:
        MemoryError, OSError: there is no memory or no descriptor left.
    """
    ends = [engine.close]
    try:
        pool = pool or engine.allocate(count, nbytes)
        ends.append(pool.close)
        engine.open(pool.buffers, len(pool.buffers))
    except BaseException:
        finish(*ends)
        raise
    return pool


def survey() -> list[EngineStatus]:
    """Return, for every known engine, whether it can run here and if not, why."""
    found: list[EngineStatus] = []
    for name in names():
        try:
            load(name)
            found.append(EngineStatus(name, None))
        except EngineUnavailableError as error:
            found.append(EngineStatus(name, str(error)))
    return found
