"""What moves bytes between a file and a device past the host: cuFile, or what is like it (hipFile).

A driver knows files by handles of its own and device memory by addresses. Every count that it
gives is looked at by who called it.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from fastserial.engines.base import Op

if TYPE_CHECKING:
    import torch

__all__ = ["Call", "DirectDriver", "DirectTransferError", "Region"]


class DirectTransferError(OSError):
    """A transfer past the host failed; the bytes can still go through it.

    Attributes:
        status: the driver's own number for it; 0: none, or an error of the file system.
        settled: whether the driver is done with the memory; if not, it may never be used again.
    """

    def __init__(self, message: str, status: int = 0, settled: bool = True) -> None:
        super().__init__(errno.EIO, message)
        self.status = status
        self.settled = settled

    def __str__(self) -> str:
        return str(self.strerror)


class Call(ctypes.Structure):
    """Parameters of one transfer. One that is asynchronous reads and writes them as it runs.

    `size` bytes, at `offset` of the file, from byte `start` of the region on. `moved`: how many
    were, or the driver's negative status.
    """

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("offset", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("moved", ctypes.c_ssize_t),
    )
    size: int
    offset: int
    start: int
    moved: int


class Region(NamedTuple):
    """Device memory from `address` on; the driver may have it registered."""

    device: torch.device
    address: int
    registered: bool


class DirectDriver(Protocol):
    """The calls of a driver. Any thread may make them, several at once.

    Raises `DirectTransferError` where the driver says no.
    """

    name: str  # and version, and the way that it takes
    largest_piece: int  # bytes of one transfer of a batch

    def serves(self, device: torch.device) -> bool:
        """Return whether it moves the memory of a device."""

    def on(self, device: torch.device) -> AbstractContextManager[None]:
        """Make a device the calling thread's, as the other calls need it."""

    def open_file(self, fd: int) -> int:
        """Register a descriptor that is open for direct I/O, and return its handle."""

    def close_file(self, file: int) -> None:
        """Forget a handle; nothing is under way."""

    def register(self, address: int, nbytes: int) -> bool:
        """Register device memory; False: it is used as it is."""

    def release(self, address: int) -> None:
        """Forget registered memory."""

    def move(self, op: Op, file: int, region: Region, call: Call) -> int:
        """Transfer, and return how many bytes were moved, or a negative status."""

    def start(self, op: Op, file: int, region: Region, call: Call, stream: int) -> None:
        """Queue a transfer on a stream; the call must stay as it is until the stream is past it."""

    def move_batch(self, op: Op, file: int, region: Region, calls: Sequence[Call]) -> None:
        """Transfer pieces of at most `largest_piece` bytes together, and set each call's `moved`.

        Raises:
            DirectTransferError: none was started; or nobody knows, and it is not `settled`.
        """

    def describe(self, status: int) -> str:
        """Return what a negative status means."""
