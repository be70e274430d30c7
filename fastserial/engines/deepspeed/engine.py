"""Engine `deepspeed`: writes by DeepSpeed's libaio threads (`aio_handle`).

DeepSpeed never reads the result of its I/O events: a write that failed looks like one that worked.
A file system with holes shows the difference: a range that was reserved or skipped is a hole
(`lseek(SEEK_HOLE)`), and direct I/O turns it into data only when the device has taken it. So
DeepSpeed gets a block only where the file has none of its bytes yet, and when DeepSpeed is done
they must be there; else a plain call writes them again, and reports the error. Where nothing would
show whether bytes were moved (existing data, the page cache, reads), plain calls move them.

DeepSpeed copies from memory it does not know as locked. Locking 32 MiB takes about as long as
writing them, so locked memory is kept for the next file.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import math
import mmap
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from fastserial.config.performance import PAGE
from fastserial.engines import Capabilities, Op, Request
from fastserial.engines.deepspeed import aio_op
from fastserial.engines.deepspeed.aio_op import AioSettings, missing
from fastserial.engines.threads import ThreadsEngine, transfer
from fastserial.files import linux
from fastserial.interrupts import Locked, ours
from fastserial.memory.buffers import BufferPool
from fastserial.memory.huge_pages import gather_pages

if TYPE_CHECKING:
    import torch


_log = logging.getLogger("fastserial")


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
        with Locked(_lock):
            if not _spare:
                _spare.append(self._tensor)
                return
        self._handle.free_cpu_locked_tensor(self._tensor)


def locked_pool(handle: Any, count: int, nbytes: int) -> LockedPool | None:
    """Return up to `count` buffers of `nbytes` bytes; None if not even one may be locked.

    `handle` is DeepSpeed's, which locks memory.
    """
    with Locked(_lock):
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


def _forget() -> None:
    """In a forked child: no lock is inherited, nor locked memory; DeepSpeed must not free that."""
    global _lock
    _lock = threading.RLock()
    for tensor in _spare:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(tensor))
    _spare.clear()


os.register_at_fork(after_in_child=_forget)


def may_lock(nbytes: int) -> bool:
    """Return whether this process may lock so many bytes now."""
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        anchor = ctypes.c_char.from_buffer(memory)
        address = ctypes.c_void_p(ctypes.addressof(anchor))
        del anchor  # or the mapping could not be closed, which unlocks it
        return bool(ctypes.CDLL(None).mlock(address, ctypes.c_size_t(nbytes)) == 0)


class DeepSpeedEngine(ThreadsEngine):
    """A few threads, each of which has its blocks written by a handle of DeepSpeed's.

    A handle can only wait for all that it was given; so each is given one block at a time.
    """

    name: ClassVar[str] = "deepspeed"
    capabilities: ClassVar[Capabilities] = Capabilities(any_memory=False)

    def __init__(self, threads: int = 4, settings: AioSettings | None = None) -> None:
        """Make an engine.

        Args:
            threads: how many handles write at a time, each with one thread of DeepSpeed's.
            settings: the arguments of the handles, but for `intra_op_parallelism`.
        """
        super().__init__(threads)
        self._settings = replace(settings or AioSettings(), intra_op_parallelism=1)

    @classmethod
    def unavailable(cls) -> str | None:
        problems = missing()
        if not problems and not may_lock(PAGE):
            problems = ["no memory may be locked: ulimit -l unlimited"]
        return "; ".join(problems) or None

    def allocate(self, count: int, nbytes: int) -> BufferPool:
        """Return buffers in locked memory, fewer if `ulimit -l` does not allow `count`.

        If it does not allow one, they are not locked, and plain calls write all blocks.
        """
        handle = aio_op.borrow_handle(self._settings)
        aio_op.give_back(self._settings, handle)
        pool = locked_pool(handle, count, nbytes)
        if pool is None:
            _log.warning("no %d bytes may be locked (ulimit -l): DeepSpeed writes nothing", nbytes)
            return super().allocate(count, nbytes)
        self._move = partial(_write, self._settings, pool.tensors)
        return pool


def _write(settings: AioSettings, tensors: Mapping[int, torch.Tensor], request: Request) -> int:
    """Move the bytes of a request, on a thread that no signal handler interrupts.

    Args:
        settings: of the handles.
        tensors: locked memory, by the address of the buffer.
        request: read, or written as far as possible by DeepSpeed.
    """
    fd, offset = request.fd, request.offset
    tensor, unit = tensors.get(request.buffer.address), _unit(fd)
    if request.op is Op.READ or tensor is None or not unit or offset % unit:
        return transfer(request)
    length = request.length - request.length % unit
    if not length or not is_blank(fd, offset, length):
        return transfer(request)
    aio_op.write(settings, tensor[:length], fd, offset)
    if not is_written(fd, offset, length):
        _log.warning("DeepSpeed lost a write of %d bytes; it is done again", length)
        length = 0
    return transfer(request, length)


def _unit(fd: int) -> int:
    """Return the alignment of direct I/O on a descriptor (bytes), 0 if it is not direct."""
    if not fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
        return 0
    alignment = linux.direct_alignment(fd)
    # not finer than the file system's blocks: holes are seen by the block
    units = (alignment.memory, alignment.offset) if alignment else ()
    return math.lcm(PAGE, os.fstat(fd).st_blksize, *filter(None, units))


def is_blank(fd: int, offset: int, length: int) -> bool:
    """Return whether a region of a file holds no data yet, and the file system shows when it does.

    Space is reserved past the end of the file, where there are no holes. That never shortens the
    file, which other threads may be extending.
    """
    end = offset + length
    try:
        if os.fstat(fd).st_size < end and not linux.preallocate(fd, offset, length):
            return False
        return os.lseek(fd, offset, os.SEEK_DATA) >= end
    except ours(OSError) as error:
        return error.errno == errno.ENXIO  # no data from `offset` to the end of the file


def is_written(fd: int, offset: int, length: int) -> bool:
    """Return whether every block of a region that was blank has been written."""
    try:
        return os.lseek(fd, offset, os.SEEK_HOLE) >= offset + length
    except ours(OSError):
        return False
