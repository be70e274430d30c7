"""Opening a file once more for direct I/O, which passes the page cache by."""

from __future__ import annotations

import os
from typing import NamedTuple

from fastserial.config.performance import PAGE
from fastserial.files import linux
from fastserial.interrupts import Descriptors

__all__ = ["DirectFile", "open_direct"]


class DirectFile(NamedTuple):
    """What became of it.

    Attributes:
        fd: the descriptor for direct I/O, -1 if there is none.
        alignment: of offset, length and memory of each transfer (bytes).
        refusal: why there is none, or None.
    """

    fd: int
    alignment: int = PAGE
    refusal: str | None = None


def open_direct(fd: int, flags: int, block_size: int, files: Descriptors) -> DirectFile:
    """Open the file behind a descriptor for direct I/O in blocks.

    Args:
        fd: of the file.
        flags: how to open it.
        block_size: a multiple of the page size (bytes).
        files: owns the new descriptor.
    """
    wanted = linux.direct_alignment(fd)
    if wanted is None:
        return DirectFile(-1, PAGE, "the file system has no direct I/O for this file")
    alignment = max(PAGE, wanted.offset, wanted.memory)
    if block_size % alignment:
        what = f"block_size is not a multiple of the device's {alignment} bytes"
        return DirectFile(-1, alignment, what)
    try:
        return DirectFile(linux.reopen(fd, flags | os.O_DIRECT, files), alignment)
    except OSError as error:
        return DirectFile(-1, alignment, f"direct I/O refused: {error.strerror}")
