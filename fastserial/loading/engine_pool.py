"""Engines and staging buffers that open files share: taken for a read, given back after it.

A file that is open and not being read has no threads and no buffers. What is idle is kept as long
as any file refers to the pool, which is one per process.
"""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from typing import Any, NamedTuple

from fastserial.config import Config
from fastserial.engines import Engine, create, start
from fastserial.errors import EngineUnavailableError
from fastserial.interrupts import finish
from fastserial.memory.buffers import BufferPool

__all__ = ["EnginePool", "OpenEngine", "common_pool", "open_engine"]


class OpenEngine(NamedTuple):
    """An engine that is open, and its staging buffers: no memory before they are used."""

    engine: Engine
    pool: BufferPool

    def close(self) -> None:
        """Stop the engine and free the buffers. Idempotent."""
        finish(self.engine.close, self.pool.close)


def open_engine(config: Config) -> OpenEngine:
    """Return a new engine that reads.

    Raises:
        EngineUnavailableError: the configured engine cannot read here.
    """
    engine = create(config.engine, config.threads)
    if not engine.capabilities.moves_data:
        raise EngineUnavailableError(f"engine {config.engine!r} does not read")
    return OpenEngine(engine, start(engine, config.queue_depth, config.block_size))


class EnginePool:
    """Open engines that have nothing to do. No lock: a signal handler may read, too.

    They end with the pool, since an engine's threads end with the last reference to it. Nothing is
    closed then: the last to refer to a pool may be one of these threads, which cannot wait for
    itself, and a finalizer would let others find a pool that is ending.
    """

    def __init__(self) -> None:
        self._idle: defaultdict[Any, list[OpenEngine]] = defaultdict(list)

    def take(self, config: Config) -> OpenEngine:
        """Return an open engine, the caller's until `give`.

        Raises:
            EngineUnavailableError: the configured engine cannot read here.
        """
        try:
            return self._idle[_kind(config)].pop()
        except IndexError:
            return open_engine(config)

    def give(self, config: Config, opened: OpenEngine) -> None:
        """Take back an engine with nothing in flight; one that needs its own buffers ends here."""
        if opened.engine.capabilities.any_memory:
            self._idle[_kind(config)].append(opened)
        else:
            opened.close()

    def forget(self) -> None:
        """In a forked child: the threads are not there."""
        self._idle.clear()


def _kind(config: Config) -> object:
    return config.engine, config.threads, config.queue_depth, config.block_size


_common: weakref.ref[EnginePool] | None = None


def common_pool() -> EnginePool:
    """Return the pool of this process."""
    global _common
    pool = _common() if _common is not None else None
    if pool is None:
        pool = EnginePool()
        _common = weakref.ref(pool)
    return pool


def _forget() -> None:
    pool = _common() if _common is not None else None
    if pool is not None:
        pool.forget()


os.register_at_fork(after_in_child=_forget)
