"""Memory locked for DeepSpeed's threads, kept for the next file.

DeepSpeed copies from memory it does not know as locked. Locking 32 MiB takes about as long as
writing them.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from typing import TYPE_CHECKING, Any

from fastserial.memory.buffers import BufferPool
from fastserial.memory.huge_pages import gather_pages

if TYPE_CHECKING:
    import torch


_lock = threading.RLock()  # a signal handler may come while its thread holds it
_spare: list[torch.Tensor] = []  # at most one


class LockedPool(BufferPool):
    """Equal buffers in a byte tensor that DeepSpeed knows as locked in memory.

    Attributes:
        tensors: the part of the tensor that is a buffer, by the buffer's address.
    """

    def __init__(self, handle: Any, tensor: torch.Tensor, count: int, nbytes: int) -> None:
        """Divide `tensor`, which begins with a page; `handle` frees it in the end."""
        anchor = (ctypes.c_char * (count * nbytes)).from_address(tensor.data_ptr())
        self._handle, self._tensor = handle, tensor
        self._divide(memoryview(anchor).cast("B"), tensor.data_ptr(), count, nbytes)
        parts = (tensor[start : start + nbytes] for start in range(0, count * nbytes, nbytes))
        self.tensors = dict(zip((b.address for b in self.buffers), parts, strict=True))

    def _unmap(self) -> None:
        if not self.tensors:
            return
        self.tensors.clear()
        with _lock:
            if not _spare:
                _spare.append(self._tensor)
                return
        self._handle.free_cpu_locked_tensor(self._tensor)


def locked_pool(handle: Any, count: int, nbytes: int) -> LockedPool | None:
    """Return up to `count` buffers of `nbytes` bytes; None if not even one may be locked.

    `handle` is DeepSpeed's, which locks memory.
    """
    with _lock:
        tensor = _spare.pop() if _spare else None
    if tensor is not None and tensor.nbytes < count * nbytes:
        handle.free_cpu_locked_tensor(tensor)  # so that more may be locked
        tensor = None
    if tensor is None:
        import torch

        # DeepSpeed's allocator ends the process where memory cannot be locked
        while count and not may_lock(count * nbytes):
            count //= 2
        if not count:
            return None
        tensor = handle.new_cpu_locked_tensor(count * nbytes, torch.empty(0, dtype=torch.uint8))
        gather_pages(tensor.data_ptr(), tensor.nbytes)
    return LockedPool(handle, tensor, count, nbytes)


def may_lock(nbytes: int) -> bool:
    """Return whether this process may lock so many bytes now."""
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        anchor = ctypes.c_char.from_buffer(memory)
        address = ctypes.c_void_p(ctypes.addressof(anchor))
        del anchor  # or the mapping could not be closed, which unlocks it
        return bool(ctypes.CDLL(None).mlock(address, ctypes.c_size_t(nbytes)) == 0)
