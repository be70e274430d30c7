"""Writing through the page cache, for little data: no engine and no threads."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence

from fastserial import trace
from fastserial.config.performance import CACHED_CHUNK
from fastserial.formats.extents import Data, Literal
from fastserial.saving.fill import Part, fill

__all__ = ["write_all", "write_buffered"]


@trace.traced("write (page cache)")
def write_buffered(fd: int, parts: Sequence[Part]) -> None:
    """Write parts to a file, in the order given.

    Args:
        fd: of the file.
        parts: what needs checksums comes after what gives them.

    Raises:
        OSError: the disk is full or failed.
        StorageChangedError: a storage was resized during the save.
    """
    buffer = bytearray()
    together: list[Part] = []
    end = gathered = 0  # where they end in the file, and their bytes

    def write() -> None:
        nonlocal buffer, gathered
        if gathered > len(buffer):
            buffer = bytearray(max(gathered, min(total, CACHED_CHUNK)))
        if together:
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            view = memoryview(buffer)[:gathered]
            fill(together, view, address)
            write_all(fd, view, end - gathered)
            together.clear()
            gathered = 0

    total = sum([part.length for part in parts])
    for part in parts:
        for chunk in _chunks(part):
            if chunk.offset != end or gathered + chunk.length > CACHED_CHUNK:
                write()
            together.append(chunk)
            gathered += chunk.length
            end = chunk.offset + chunk.length
    write()


def _chunks(part: Part) -> Iterator[Part]:
    """Cut a part up, so that little memory is taken at a time."""
    offset, source, start, length, ledger = part
    if length <= CACHED_CHUNK or not isinstance(source, Data | Literal):
        yield part
        return
    for done in range(0, length, CACHED_CHUNK):
        yield Part(offset + done, source, start + done, min(CACHED_CHUNK, length - done), ledger)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write bytes to a file from byte `offset` on.

    Raises:
        OSError: the disk is full or failed.
    """
    while data:
        written = os.pwrite(fd, data, offset)
        if written == 0:
            raise OSError(errno.EIO, f"{len(data)} bytes were not written")
        offset += written
        data = data[written:]
