"""A pool of aligned staging buffers with a byte budget.

The pool is the only memory a save needs beyond the objects themselves; its size does not depend
on the checkpoint's. Device storages pass through it in chunks, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence

from fastserial.errors import EngineError

__all__ = ["Buffer", "BufferPool", "host_buffer", "own_buffer"]


def host_buffer(address: int, nbytes: int) -> Buffer:
    """Return host memory at an address as a buffer; whoever uses it keeps the memory alive."""
    view = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
    return Buffer(-1, view, address)


def own_buffer(nbytes: int) -> Buffer:
    """Return new host memory, for something small, as a buffer that keeps it alive."""
    memory = (ctypes.c_char * nbytes)()
    return Buffer(-1, memoryview(memory).cast("B"), ctypes.addressof(memory))


class Buffer:
    """One page-aligned buffer: `address`, `nbytes`, and `view`, a writable memoryview of it."""

    __slots__ = ("address", "index", "nbytes", "view")

    def __init__(self, index: int, view: memoryview, address: int) -> None:
        self.index = index
        self.view = view
        self.address = address
        self.nbytes = len(view)


class BufferPool:
    """A fixed number of equal buffers in one anonymous mapping.

    Not thread-safe: the thread that submits requests takes and gives back.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        """Map `count` buffers of `nbytes` bytes (a multiple of the page size) each."""
        self._map = mmap.mmap(-1, count * nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # fewer faults, and fewer pages to pin for direct I/O
            self._map.madvise(mmap.MADV_HUGEPAGE)
        anchor = ctypes.c_char.from_buffer(self._map)
        self._anchor: ctypes.c_char | None = anchor
        self._divide(memoryview(self._map), ctypes.addressof(anchor), count, nbytes)

    def _divide(self, whole: memoryview, address: int, count: int, nbytes: int) -> None:
        """Make the buffers; `whole` shows the memory at `address`."""
        self.buffers: Sequence[Buffer] = [
            Buffer(i, whole[i * nbytes : (i + 1) * nbytes], address + i * nbytes)
            for i in range(count)
        ]
        self._whole = whole
        self._free = list(reversed(self.buffers))

    @property
    def free(self) -> int:
        """Number of buffers that can be taken."""
        return len(self._free)

    def take(self) -> Buffer:
        """Take a free buffer.

        Raises:
            EngineError: there is none.
        """
        if not self._free:
            raise EngineError("no free staging buffer")
        return self._free.pop()

    def give(self, buffer: Buffer) -> None:
        """Give a buffer back."""
        self._free.append(buffer)

    def close(self) -> None:
        """Unmap the memory. No request may be using a buffer any more."""
        self._free.clear()
        for buffer in self.buffers:
            buffer.view.release()
        self.buffers = ()
        self._whole.release()
        self._unmap()

    def _unmap(self) -> None:
        self._anchor = None
        # an error's traceback may still show a buffer; the memory goes when that does
        with contextlib.suppress(BufferError):
            self._map.close()
