"""The blocks of a save that come from devices: through the ring, or past the host."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from fastserial.config import Config
from fastserial.engines import Engine
from fastserial.memory.ring import on_host, open_ring
from fastserial.reports import Transfer
from fastserial.saving.fill import Part, fetches, lone_memory

if TYPE_CHECKING:
    import torch

    from fastserial.engines.gds.memory import DirectMemory, Move
    from fastserial.memory.buffers import Buffer
    from fastserial.memory.ring import Ring

__all__ = ["DeviceBlocks"]


class DeviceBlocks:
    """Starts what blocks of one file need from devices. Used by the thread that queues them.

    Attributes:
        ring: staging buffers for parts from devices; None: there are none, or not yet.
    """

    def __init__(self, config: Config) -> None:
        self.ring: Ring | None = None
        self._transfer = on_host(config)
        self._config = config
        self._devices: set[torch.device] = set()
        self._path: DirectMemory | None = None  # of device memory, past the host

    @property
    def transfer(self) -> Transfer:
        """The transfer type taken, and why."""
        return self._transfer if self._path is None else self._path.transfer

    def copy_at_once(self, why: str) -> None:
        """Note that parts from devices are copied where they are written."""
        self._transfer = Transfer("cpu_gpu", why)

    def join(self, devices: Collection[torch.device], begun: bool) -> None:
        """Get ready for parts from devices, as they are after what is queued there now.

        Args:
            devices: that they come from.
            begun: there are buffers already.
        """
        self._devices.update(devices)
        if self.ring is not None:
            self.ring.join(devices)
            if self._path is not None:
                self._path.join(devices)
        elif begun:
            self.copy_at_once("the file began with blocks of the host")

    def open_ring(self, engine: Engine) -> Ring | None:
        """Return staging buffers for parts from devices; None: there are no such parts."""
        if self._devices:
            any_memory = engine.capabilities.any_memory
            self.ring, self._transfer = open_ring(self._config, self._devices, any_memory)
        return self.ring

    def open_path(self, engine: Engine, fd: int, refusal: str | None) -> bool:
        """Get ready for blocks that do not pass through the host, if they are asked for.

        Args:
            engine: what moves the blocks.
            fd: of the file.
            refusal: why the file takes no direct I/O, or None.

        Returns:
            Whether blocks may go past the host.
        """
        if self.ring is None:
            return False
        from fastserial.engines.gds.memory import offer  # not without a device

        flags = os.O_WRONLY | fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_SYNC
        self._path, self._transfer = offer(
            self._config, self._transfer, self.ring, engine, self._devices, fd, flags, refusal
        )
        return self._path is not None

    def fetch(self, parts: Sequence[Part], length: int, offset: int, buffer: Buffer) -> Move | None:
        """Start what comes from devices to a buffer.

        Args:
            parts: what the block consists of.
            length, offset: of the block in the file (bytes).
            buffer: one that was taken.

        Returns:
            What moves the block; None: the engine does.

        Raises:
            StorageChangedError: a storage was resized.
        """
        if self.ring is None:
            return None
        path = self._path
        lone = lone_memory(parts) if path is not None else None
        if path is not None and lone is not None:
            memory, shown = lone
            if path.takes(memory.device, offset, length):
                first = parts[0].start
                return path.write(buffer, memory, first, length, shown)
        self.ring.fetch(buffer, fetches(parts))
        return None

    def close(self) -> None:
        """Wait for what goes past the host; the ring is closed after this. Idempotent."""
        if self._path is not None:
            self._path.close()
