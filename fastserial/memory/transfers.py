"""Which way bytes go between the disk and a device: the transfer types of the option `transfer`."""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Collection
from typing import TYPE_CHECKING

from fastserial.config import Config, current
from fastserial.config.performance import PINNED_RING, THROUGH_RING
from fastserial.memory import devices
from fastserial.memory.ring import Ring, pinned_store
from fastserial.memory.storages import StorageMemory, memmove
from fastserial.reports import HOST_ONLY, Transfer

if TYPE_CHECKING:
    import torch

    from fastserial.memory.buffers import Buffer

__all__ = ["DIRECT", "copy_to_host", "instead", "on_host", "open_ring"]

_log = logging.getLogger("fastserial")
DIRECT = ("gds", "gpu_async", "gpu_batch")  # past the host: engines.gds
_warned: set[str] = set()


def instead(word: str, why: str) -> Transfer:
    """Return what is taken for a transfer type that cannot be had; warn of it once."""
    if word not in _warned:
        _warned.add(word)
        text = f"transfer {word!r}: {why}; going on with 'cpu_async_gpu'"
        warnings.warn(text, UserWarning, stacklevel=2)
    return Transfer("cpu_async_gpu", f"{word}: {why}")


def on_host(config: Config) -> Transfer:
    """Return the transfer type of a file whose tensors are all on the host, and why it is none."""
    word = config.transfer
    return Transfer("cpu", f"{word}: no tensor is on a device") if word in DIRECT else HOST_ONLY


def _wanted(config: Config) -> Transfer:
    """Return the transfer type to try through the host."""
    word = config.transfer
    if word == "auto":
        return Transfer("cpu_async_gpu", "auto: pinned memory and streams of its own")
    if word in DIRECT:
        return Transfer("cpu_async_gpu", f"{word}: for blocks of files only")
    return Transfer(word, "asked for")


def open_ring(
    config: Config, places: Collection[torch.device], any_memory: bool = True
) -> tuple[Ring | None, Transfer]:
    """Return a ring for copies from and to devices, or None, and the transfer type that it is.

    The copies come after what the calling thread's current streams hold now. Without a ring each
    copy is waited for.

    Args:
        config: the options in force.
        places: the devices.
        any_memory: the engine moves blocks from and to any memory, not only its own.
    """
    asked = _wanted(config)
    if asked.word in ("cpu", "cpu_gpu"):
        return None, Transfer("cpu_gpu", asked.why)
    count = min(2 * config.queue_depth, PINNED_RING // config.block_size)
    why = _objection(places, any_memory, count)
    if why is None:
        try:
            pinned = pinned_store.take()
        except RuntimeError as error:
            why = f"no pinned memory: {error}"
        else:
            if pinned is not None:
                ring = Ring(pinned, count, config.block_size)
                try:
                    ring.join(places)
                except BaseException:
                    ring.close()
                    raise
                return ring, asked
            why = "other saves or loads use the pinned memory"
    _log.debug("device tensors go through the host, one copy after the other: %s", why)
    return None, Transfer("cpu_gpu", why)


def copy_to_host(memory: StorageMemory, address: int, start: int, length: int) -> None:
    """Copy bytes [start, start + length) of a device's memory to any host memory.

    What is large goes through a ring: the host copies on what has come, while the rest is on its
    way.

    Raises:
        StorageChangedError: the storage was resized.
    """
    config = current()
    ring = open_ring(config, {memory.device})[0] if length >= THROUGH_RING else None
    if ring is None:
        memory.copy_to(address, start, length)
        return
    size = config.block_size
    under_way: deque[tuple[Buffer, int]] = deque()
    at = 0
    try:
        while at < length or under_way:
            if at < length and ring.free:
                buffer = ring.take()
                ring.fetch(buffer, [(0, memory, start + at, min(size, length - at))])
                under_way.append((buffer, at))
                at += size
                continue
            buffer, done = under_way.popleft()
            ring.arrive(buffer)
            memmove(address + done, buffer.address, min(size, length - done))
            ring.give(buffer)
        memory.check()
    finally:
        ring.close()


def _objection(places: Collection[torch.device], any_memory: bool, count: int) -> str | None:
    """Return why there can be no ring, or None."""
    if not any_memory:
        return "the engine has buffers of its own"
    if count < 2:
        return "two blocks are more than the pinned memory: set a smaller block_size"
    for device in places:
        if not devices.has_streams(device):
            return f"torch has no streams for {device.type}"
    return None
