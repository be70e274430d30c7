"""Memory locked for DeepSpeed's threads: our own, kept for the next file, or the caller's.

DeepSpeed copies from memory it does not know as locked. Locking 32 MiB takes about as long as
writing them.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fastserial.config.performance import PAGE
from fastserial.engines.deepspeed.aio_op import lockable
from fastserial.errors import EngineUnavailableError
from fastserial.memory.buffers import Buffer, BufferPool
from fastserial.memory.huge_pages import gather_pages

if TYPE_CHECKING:
    import torch

__all__ = ["LockedPool", "given_pool", "own_pool"]

_log = logging.getLogger("fastserial")
_lock = threading.RLock()  # a signal handler may come while its thread holds it
_spare: list[torch.Tensor] = []  # at most one
_claimed: set[int] = set()  # addresses of memory given, while a file uses it


class LockedPool(BufferPool):
    """Equal buffers in a byte tensor that DeepSpeed knows as locked in memory."""

    def __init__(
        self, tensor: torch.Tensor, count: int, nbytes: int, release: Callable[[], None]
    ) -> None:
        """Divide `tensor`; `release` is called when no buffer is used any more."""
        address = tensor.data_ptr() + -tensor.data_ptr() % PAGE
        anchor = (ctypes.c_char * (count * nbytes)).from_address(address)
        self.tensor = tensor
        self._release: Callable[[], None] | None = release
        self._divide(memoryview(anchor).cast("B"), address, count, nbytes)

    def tensor_of(self, buffer: Buffer) -> torch.Tensor:
        """Return the part of the tensor that is a buffer."""
        start = buffer.address - self.tensor.data_ptr()
        return self.tensor[start : start + buffer.nbytes]

    def _unmap(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()


def own_pool(handle: Any, count: int, nbytes: int) -> LockedPool:
    """Return buffers of our own, fewer than `count` if `ulimit -l` does not allow as many.

    Raises:
        EngineUnavailableError: not even one buffer of `nbytes` bytes may be locked.
    """
    tensor = _take_spare(handle, count * nbytes)
    if tensor is None:
        import torch

        allowed = lockable(count * nbytes) // nbytes
        if not allowed:
            raise EngineUnavailableError(
                f"engine 'deepspeed' needs {nbytes} bytes of locked memory: ulimit -l "
                f"{nbytes // 1024}, or a smaller block_size"
            )
        count = min(count, allowed)
        tensor = handle.new_cpu_locked_tensor(count * nbytes, torch.empty(0, dtype=torch.uint8))
        gather_pages(tensor.data_ptr(), tensor.nbytes)
    return LockedPool(tensor, count, nbytes, partial(_keep, handle, tensor))


def _take_spare(handle: Any, nbytes: int) -> torch.Tensor | None:
    with _lock:
        tensor = _spare.pop() if _spare else None
    if tensor is not None and tensor.nbytes < nbytes:
        handle.free_cpu_locked_tensor(tensor)  # so that more may be locked
        return None
    return tensor


def _keep(handle: Any, tensor: torch.Tensor) -> None:
    with _lock:
        if not _spare:
            _spare.append(tensor)
            return
    handle.free_cpu_locked_tensor(tensor)


def given_pool(handle: Any, memory: torch.Tensor, count: int, nbytes: int) -> LockedPool | None:
    """Return buffers in the caller's memory, or None if it does not do."""
    address = memory.data_ptr()
    room = (memory.nbytes - -address % PAGE) // nbytes
    if room < 1 or memory.device.type != "cpu" or not handle.is_pinned(memory):
        _log.debug("the buffer given is too small or not pinned; locking other memory")
        return None
    with _lock:
        if address in _claimed:
            _log.debug("the buffer given is in use by another save; locking other memory")
            return None
        _claimed.add(address)
    return LockedPool(memory, min(count, room), nbytes, partial(_give_back, address))


def _give_back(address: int) -> None:
    with _lock:
        _claimed.discard(address)
