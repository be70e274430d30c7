"""The route of the blocks of a file to its device: one function chooses it, before the first block.

Later blocks may take a second route: the trial of the device has ended, direct I/O was refused, or
there is no memory for an engine.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass, replace
from typing import Literal

from fastserial.config import Config
from fastserial.config.performance import PAGE
from fastserial.engines import Capabilities, EngineFactory, capabilities_of, load
from fastserial.files.caching import fits, is_fast
from fastserial.files.linux import DirectFile, compresses, open_direct
from fastserial.interrupts import Descriptors
from fastserial.reasons import QUICKER, SEE_DOCTOR, Reason

_COMPRESSED = Reason("the file system compresses this file, but not direct writes", QUICKER)
_REFUSED = Reason("direct I/O refused at the first write: Invalid argument", SEE_DOCTOR)
_RouteKind = Literal["direct", "cached", "trial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How the blocks of one file get to its device. Sizes are bytes.

    Attributes:
        kind: `direct`: past the page cache, but for what is not aligned; `cached`: through it;
            `trial`: through it, until it is known whether direct I/O is faster.
        engine: makes the engine; None: there is no memory for one.
        block_size: of a block at most.
        queue_depth: blocks in flight at once.
        threads: that the engine may start.
        direct_fd: the file, open for direct I/O; -1: it is not.
        alignment: of what direct I/O writes.
        writeback: the device starts to write each block as soon as it is in the page cache.
        fallback: why this is not the fastest route, or None.
    """

    kind: _RouteKind
    engine: EngineFactory | None
    block_size: int
    queue_depth: int
    threads: int
    direct_fd: int = -1
    alignment: int = PAGE
    writeback: bool = False
    fallback: Reason | None = None

    def after_trial(self, fast: bool) -> Route:
        """Return the route once the device was measured."""
        return replace(self, kind="direct" if fast else "cached")

    def past_the_host(self) -> Route:
        """Return the route for device memory that does not pass through the host."""
        return replace(self, kind="direct")

    def refused(self) -> Route:
        """Return the route of a file that refused a direct write."""
        return replace(self, kind="cached", writeback=False, fallback=_REFUSED)

    def without_engine(self, why: object) -> Route:
        """Return the route that needs no memory: block by block, by the calling thread."""
        fallback = Reason(f"through the page cache, block by block: {why}", SEE_DOCTOR)
        return replace(self, kind="cached", engine=None, fallback=fallback)


def choose_route(fd: int, files: Descriptors, config: Config, expected: int | None) -> Route:
    """Return the route of a file's first block.

    Args:
        fd: of the file.
        files: owns the descriptor for direct I/O.
        config: the options.
        expected: bytes to be written, if known: a short file gets fewer buffers and threads.

    Raises:
        EngineUnavailableError: the engine cannot run here.
    """
    depth, threads = config.queue_depth, config.threads
    if expected is not None:
        blocks = max(1, -(-expected // config.block_size))
        depth, threads = min(blocks, depth), min(blocks, threads)
    engine = load(config.engine) if isinstance(config.engine, str) else config.engine
    found = DirectFile(-1)
    kind: _RouteKind = "cached"
    if config.never_direct:
        pass
    elif config.direct is not True and compresses(fd):
        found = DirectFile(-1, refusal=_COMPRESSED)
    else:
        synced = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_SYNC  # or O_DSYNC, part of it
        found = open_direct(fd, os.O_WRONLY | synced, config.block_size, files)
        if found.refusal is None:
            kind = _fastest(fd, config, capabilities_of(engine), expected or 0)
    return Route(
        kind=kind,
        engine=engine,
        block_size=config.block_size,
        queue_depth=depth,
        threads=threads,
        direct_fd=found.fd,
        alignment=found.alignment,
        writeback=found.fd >= 0 and config.durable,
        fallback=found.refusal,
    )


def _fastest(fd: int, config: Config, capabilities: Capabilities, nbytes: int) -> _RouteKind:
    """Return the fastest kind for a file that takes direct I/O; of equals, the cached one."""
    if not capabilities.any_memory:
        return "direct"  # such an engine is slow with the page cache
    if config.direct is True or config.cache == "drop":
        return "direct"
    if config.cache == "keep":
        return "cached"
    fast = is_fast(fd)
    if fast or not fits(nbytes):
        return "direct"
    return "trial" if fast is None else "cached"
