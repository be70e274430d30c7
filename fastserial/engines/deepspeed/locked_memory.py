"""Memory locked for DeepSpeed's threads: our own, kept for the next file, or the caller's.

DeepSpeed copies from memory it does not know as locked. Locking 32 MiB takes about as long as
writing them.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fastserial.config.performance import PAGE
from fastserial.errors import EngineUnavailableError
from fastserial.memory.buffers import BufferPool
from fastserial.memory.huge_pages import gather_pages

if TYPE_CHECKING:
    import torch

__all__ = ["LockedPool", "locked_pool", "may_lock"]

_log = logging.getLogger("fastserial")
_lock = threading.RLock()  # a signal handler may come while its thread holds it
_spare: list[torch.Tensor] = []  # at most one
_claimed: set[int] = set()  # addresses of the caller's memory, while a file uses it


class LockedPool(BufferPool):
    """Equal buffers in a byte tensor that DeepSpeed knows as locked in memory.

    Attributes:
        tensors: the part of the tensor that is a buffer, by the buffer's address.
    """

    def __init__(
        self, tensor: torch.Tensor, count: int, nbytes: int, release: Callable[[], None]
    ) -> None:
        """Divide `tensor`; `release` is called when no buffer is used any more."""
        first = -tensor.data_ptr() % PAGE
        address = tensor.data_ptr() + first
        anchor = (ctypes.c_char * (count * nbytes)).from_address(address)
        self._release: Callable[[], None] | None = release
        self._divide(memoryview(anchor).cast("B"), address, count, nbytes)
        starts = range(first, first + count * nbytes, nbytes)
        parts = (tensor[start : start + nbytes] for start in starts)
        self.tensors = dict(zip((b.address for b in self.buffers), parts, strict=True))

    def _unmap(self) -> None:
        release, self._release = self._release, None
        self.tensors.clear()
        if release is not None:
            release()


def locked_pool(handle: Any, given: torch.Tensor | None, count: int, nbytes: int) -> LockedPool:
    """Return up to `count` buffers of `nbytes` bytes.

    Args:
        handle: DeepSpeed's, which locks memory.
        given: the caller's memory, used if it is free, large enough, and locked or pinned.

    Raises:
        EngineUnavailableError: not even one buffer may be locked (`ulimit -l`).
    """
    if given is not None:
        most = (given.nbytes - -given.data_ptr() % PAGE) // nbytes
        if most < 1 or given.device.type != "cpu" or not handle.is_pinned(given):
            _log.debug("the buffer given is too small or not pinned; locking other memory")
        elif _claim(given.data_ptr()):
            release = partial(_claimed.discard, given.data_ptr())
            return LockedPool(given, min(count, most), nbytes, release)
    with _lock:
        tensor = _spare.pop() if _spare else None
    if tensor is not None and tensor.nbytes < count * nbytes:
        handle.free_cpu_locked_tensor(tensor)  # so that more may be locked
        tensor = None
    if tensor is None:
        import torch

        # DeepSpeed's allocator ends the process where memory cannot be locked
        while not may_lock(count * nbytes):
            count //= 2
            if not count:
                raise EngineUnavailableError(
                    f"engine 'deepspeed' needs {nbytes} bytes of locked memory: ulimit -l "
                    f"{nbytes // 1024}, or a smaller block_size"
                )
        tensor = handle.new_cpu_locked_tensor(count * nbytes, torch.empty(0, dtype=torch.uint8))
        gather_pages(tensor.data_ptr(), tensor.nbytes)
    return LockedPool(tensor, count, nbytes, partial(_keep, handle, tensor))


def _claim(address: int) -> bool:
    """Return whether nobody else uses the caller's memory at an address; from now on somebody does.

    Whoever claimed it removes the address from `_claimed` in the end.
    """
    with _lock:
        if address in _claimed:
            _log.debug("the buffer given is in use by another save; locking other memory")
            return False
        _claimed.add(address)
        return True


def _keep(handle: Any, tensor: torch.Tensor) -> None:
    with _lock:
        if not _spare:
            _spare.append(tensor)
            return
    handle.free_cpu_locked_tensor(tensor)


def may_lock(nbytes: int) -> bool:
    """Return whether this process may lock so many bytes now."""
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        anchor = ctypes.c_char.from_buffer(memory)
        address = ctypes.c_void_p(ctypes.addressof(anchor))
        del anchor  # or the mapping could not be closed, which unlocks it
        return bool(ctypes.CDLL(None).mlock(address, ctypes.c_size_t(nbytes)) == 0)
