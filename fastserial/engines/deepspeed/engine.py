"""Engine `deepspeed`: writes by DeepSpeed's libaio threads (`aio_handle`).

DeepSpeed never reads the result of its I/O events: a write that failed looks like one that worked.
A file system with holes shows the difference: a range that was reserved or skipped is a hole
(`lseek(SEEK_HOLE)`), and direct I/O turns it into data only when the device has taken it. So
DeepSpeed gets a block only where the file has none of its bytes yet, and when DeepSpeed is done
they must be there; else a plain call writes them again, and reports the error. Where nothing would
show whether bytes were moved (existing data, the page cache, reads), plain calls move them.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from fastserial.config.performance import PAGE
from fastserial.engines import Capabilities, Op, Request
from fastserial.engines.deepspeed import aio_op
from fastserial.engines.deepspeed.aio_op import AioSettings, missing
from fastserial.engines.deepspeed.locked_memory import locked_pool, may_lock
from fastserial.engines.threads import ThreadsEngine, transfer
from fastserial.files import linux
from fastserial.memory.buffers import BufferPool

if TYPE_CHECKING:
    import torch


_log = logging.getLogger("fastserial")


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
    except OSError as error:
        return error.errno == errno.ENXIO  # no data from `offset` to the end of the file


def is_written(fd: int, offset: int, length: int) -> bool:
    """Return whether every block of a region that was blank has been written."""
    try:
        return os.lseek(fd, offset, os.SEEK_HOLE) >= offset + length
    except OSError:
        return False
