"""A pool of aligned staging buffers with a byte budget.

The pool is the only memory a save needs beyond the objects themselves; its size does not depend
on the checkpoint's. Device storages pass through it in chunks, too.

Where the address space has a limit (`ulimit -v`, RLIMIT_AS), it takes what there is room for.
Without a limit a thread costs what it uses. With one it costs its whole stack, and the heap that
malloc reserves for each new thread: six threads took 600 MiB of a limit that stock torch kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import resource
from collections.abc import Sequence
from dataclasses import replace

from fastserial.config import Config
from fastserial.errors import EngineError

__all__ = ["NO_ROOM", "Buffer", "BufferPool", "fitted", "has_room", "host_buffer", "own_buffer"]


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


NO_ROOM = "little address space is left (ulimit -v)"
_HEAP = 64 * 1024 * 1024  # that malloc reserves for a thread, with glibc
_STACK = 8 * 1024 * 1024  # where the limit on stacks is none


def fitted(config: Config, needed: int = 0) -> Config:
    """Return options with as many threads and blocks as half of what is left has room for.

    At least one thread and one block remain, whether there is room or not.

    Args:
        config: the options in force.
        needed: bytes that the caller will take in addition.
    """
    room = _room(needed)
    if room is None:
        return config
    each = _thread_bytes()
    threads = min(config.threads, max(1, room // 2 // each))
    depth = min(config.queue_depth, max(1, (room - threads * each) // config.block_size))
    if (threads, depth) == (config.threads, config.queue_depth):
        return config
    return replace(config, threads=threads, queue_depth=depth)


def has_room(config: Config, needed: int = 0, threads: int = 1) -> bool:
    """Return whether half of what is left has room for one block and that many threads."""
    room = _room(needed)
    return room is None or room >= config.block_size + threads * _thread_bytes()


def _room(needed: int) -> int | None:
    """Return half of the bytes left beyond those needed, None where there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        with open("/proc/self/statm", "rb") as file:
            taken = int(file.read().split()[0]) * mmap.PAGESIZE
    except OSError:  # no /proc, or no descriptor free
        return None
    return max(0, limit - taken - needed) // 2


def _thread_bytes() -> int:
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return _HEAP + (_STACK if stack == resource.RLIM_INFINITY else stack)
