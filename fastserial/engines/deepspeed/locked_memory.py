"""Memory locked for DeepSpeed's threads: our own, kept for the next file, or the caller's.

DeepSpeed copies from memory it does not know as locked. Locking 32 MiB takes about as long as
writing them.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import resource
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

__all__ = ["LockedPool", "given_pool", "may_lock", "own_pool"]

_log = logging.getLogger("fastserial")
_lock = threading.RLock()  # a signal handler may come while its thread holds it
_spare: list[torch.Tensor] = []  # at most one
_claimed: set[int] = set()  # addresses of memory given, while a file uses it


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
        self.tensors = {}
        if release is not None:
            release()


def own_pool(handle: Any, count: int, nbytes: int) -> LockedPool:
    """Return buffers of our own, fewer than `count` if `ulimit -l` does not allow as many.

    Raises:
        EngineUnavailableError: not even one buffer of `nbytes` bytes may be locked.
    """
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


def _keep(handle: Any, tensor: torch.Tensor) -> None:
    with _lock:
        if not _spare:
            _spare.append(tensor)
            return
    handle.free_cpu_locked_tensor(tensor)


def given_pool(handle: Any, memory: torch.Tensor, count: int, nbytes: int) -> LockedPool | None:
    """Return buffers in the caller's memory, or None if it does not do."""
    address = memory.data_ptr()
    most = (memory.nbytes - -address % PAGE) // nbytes
    if most < 1 or memory.device.type != "cpu" or not handle.is_pinned(memory):
        _log.debug("the buffer given is too small or not pinned; locking other memory")
        return None
    with _lock:
        if address in _claimed:
            _log.debug("the buffer given is in use by another save; locking other memory")
            return None
        _claimed.add(address)
    return LockedPool(memory, min(count, most), nbytes, partial(_claimed.discard, address))


def may_lock(nbytes: int) -> bool:
    """Return whether this process may lock so many bytes now, if need be up to its hard limit."""
    if _can_lock(nbytes):
        return True
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    return _can_lock(nbytes)


def _can_lock(nbytes: int) -> bool:
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        anchor = ctypes.c_char.from_buffer(memory)
        address = ctypes.c_void_p(ctypes.addressof(anchor))
        del anchor  # or the mapping could not be closed, which unlocks it
        return bool(ctypes.CDLL(None).mlock(address, ctypes.c_size_t(nbytes)) == 0)
