"""How a range of a file is read: through the page cache, directly, or on the device path.

A cold file is read through the page cache in lanes. The kernel reads ahead, into large folios, on a
descriptor that is read in order; threads that share a descriptor do not read in order. So the file
is cut into spans. Each is read in order on the descriptor of its lane, and the lanes alternate.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

from fastserial.config import Config
from fastserial.config.performance import (
    LANE_SPAN,
    LANES,
    MOSTLY_CACHED,
    SMALL_CACHED_LOAD,
    SMALL_LOAD,
)
from fastserial.engines import Engine
from fastserial.files import linux
from fastserial.files.linux import DirectFile, cached_fraction, open_direct, reads_through_cache
from fastserial.files.sources import FileSource
from fastserial.interrupts import Descriptors, finish
from fastserial.reasons import SEE_DOCTOR, Reason
from fastserial.reports import HOST_ONLY, Transfer

if TYPE_CHECKING:
    import torch

    from fastserial.engines.gds.memory import DirectMemory
    from fastserial.loading.pump import Block
    from fastserial.memory.buffers import Ring


_log = logging.getLogger("fastserial")


class ReadPolicy:
    """Decides how one file is read, and holds the descriptors for it.

    Attributes:
        alignment: of offset, length and memory of direct reads (bytes).
        fallback: why there is no direct I/O although it is wanted, or None.
        device_path: what reads to devices without the host, or None.
        lanes: descriptors that share the reading of a cold file through the page cache.
    """

    def __init__(self, fd: int, size: int, config: Config) -> None:
        """Decide for a file of `size` bytes behind descriptor `fd`, which stays the caller's."""
        self._fd = fd
        self._config = config
        self._files = Descriptors()
        self._lane_files = Descriptors()
        self._refused = False
        self._transfer = HOST_ONLY
        self.device_path: DirectMemory | None = None
        self.lanes: list[int] = []
        direct = self._open_direct(size)
        self.alignment, self.fallback = direct.alignment, direct.refusal
        self.direct_fd = direct.fd  # stays open after a refusal: requests in flight name it

    def _open_direct(self, size: int) -> DirectFile:
        config = self._config
        small = size <= config.small_file
        if config.never_direct or (small and config.direct is not True):
            return DirectFile(-1)
        if reads_through_cache(config, size):
            return DirectFile(-1)
        return open_direct(self._fd, os.O_RDONLY, config.block_size, self._files)

    # -- a range -------------------------------------------------------------------------------

    @property
    def never_direct(self) -> bool:
        """Whether every range is read through the page cache."""
        return self.direct_fd < 0

    def reads_directly(self, offset: int, length: int) -> bool:
        """Return whether to read these bytes with direct I/O: they are not in the page cache."""
        if self.never_direct or self._refused:
            return False
        return not self._is_cached(offset, length)

    def takes_device_path(self, device: torch.device, offset: int, length: int) -> bool:
        """Return whether to read these bytes to a device without the host."""
        if self.device_path is None or not self.device_path.takes(device, offset, length):
            return False
        return not self._is_cached(offset, length)

    def _is_cached(self, offset: int, length: int) -> bool:
        """Return whether to read bytes through the page cache: most of them are in it."""
        if self._config.direct is True:
            return False
        fraction = cached_fraction(self._fd, offset, length)
        return fraction is not None and fraction >= MOSTLY_CACHED

    def descriptor(self, offset: int) -> int:
        """Return the descriptor for reading a byte of the file through the page cache."""
        return self.lanes[lane_of(offset, len(self.lanes))] if self.lanes else self._fd

    def refuse_direct(self) -> None:
        """Continue through the page cache: the file system accepted the flag, but not the read."""
        self._refused = True
        if self.fallback is None:
            what = "direct I/O refused at the first read: Invalid argument"
            self.fallback = Reason(what, SEE_DOCTOR)
            _log.debug("%s; continuing through the page cache", self.fallback)

    # -- reads in the order of the file --------------------------------------------------------

    def open_lanes(self, first: int, stop: int, nbytes: int) -> None:
        """Prepare for reading `nbytes` bytes of range [first, stop) in the order of the file.

        If they are not in the page cache, several descriptors share them, until `close_lanes`.
        """
        if not self.never_direct or nbytes <= self._config.small_file:
            return
        if (cached_fraction(self._fd, first, stop - first) or 0.0) >= MOSTLY_CACHED:
            return
        with contextlib.suppress(OSError):  # without /proc, or with no descriptor left
            while len(self.lanes) < min(self._config.queue_depth, LANES):
                self.lanes.append(linux.reopen(self._fd, os.O_RDONLY, self._lane_files))

    def close_lanes(self) -> None:
        """Return to one descriptor; no read is in progress."""
        self.lanes = []
        self._lane_files.close()

    # -- devices -------------------------------------------------------------------------------

    @property
    def transfer(self) -> Transfer:
        """The transfer type of reads to devices, and why it was chosen."""
        return self._transfer if self.device_path is None else self.device_path.transfer

    def serve_devices(
        self, ring: Ring | None, devices: Collection[torch.device], taken: Transfer, engine: Engine
    ) -> None:
        """Read to devices without the host, if that was requested and is possible.

        Args:
            ring: the staging buffers of what passes through the host, if anything does.
            devices: the devices.
            taken: the transfer type of what passes through the host.
            engine: reads the blocks.
        """
        from fastserial.engines.gds.memory import offer  # not without a device

        refusal = "direct I/O is switched off" if self._config.never_direct else None
        self.device_path, self._transfer = offer(
            self._config, taken, ring, engine, devices, self._fd, os.O_RDONLY, refusal
        )

    def close(self) -> None:
        """Close all descriptors; no read is in progress. Idempotent."""
        device_path = self.device_path
        finish(
            *([device_path.close] if device_path is not None else []),
            self._lane_files.close,
            self._files.close,
        )
        self.direct_fd = -1


# -- lanes ---------------------------------------------------------------------------------------


def is_small(source: FileSource, config: Config) -> bool:
    """Return whether torch reads the storages of this file at least as fast as we would."""
    if source.size <= SMALL_LOAD * config.small_file:
        return True
    if source.size > SMALL_CACHED_LOAD * config.small_file:
        return False
    return (cached_fraction(source.fd, 0, source.size) or 0.0) >= MOSTLY_CACHED


def lane_of(offset: int, lanes: int) -> int:
    """Return the lane of a byte of the file."""
    return offset // LANE_SPAN % lanes


def in_turns(blocks: Iterable[Block | None], lanes: int) -> Iterator[Block | None]:
    """Yield blocks, which are given in the order of the file, so that the lanes alternate.

    Args:
        blocks: what is to be read; None: no further block is known yet. It is passed on, behind
            those held back.
        lanes: how many there are.
    """
    held: list[deque[Block]] = [deque() for _ in range(lanes)]
    group = -1

    def turns() -> Iterator[Block]:
        while any(held):
            for lane in held:
                if lane:
                    yield lane.popleft()

    for block in blocks:
        if block is None:
            yield from turns()
            yield None
            continue
        number = block.offset // (LANE_SPAN * lanes)
        if number != group:
            yield from turns()
            group = number
        held[lane_of(block.offset, lanes)].append(block)
    yield from turns()
