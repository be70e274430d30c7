"""The way through the page cache for a small file: no engine, no pool, hardly a copy.

Large host storages go to the kernel from where they lie; what is between them is put together.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fastserial.checksums import crc32
from fastserial.containers.extents import Data, Literal
from fastserial.staging import HostMemory, StorageOnHost

if TYPE_CHECKING:
    from fastserial.transfer import Part

__all__ = ["write_all", "write_buffered"]

_UNCOPIED = 64 * 1024  # a storage of so many bytes is worth a piece of its own
_CHUNK = 1024 * 1024  # stays in cache between checksum and copy into the page cache
_MOST_PIECES = 512  # the kernel takes 1024


def write_buffered(
    fd: int, parts: Sequence[Part], offset: int, staged: Callable[[list[Part]], bytearray]
) -> None:
    """Write parts one behind the other from byte `offset` of a file on.

    Args:
        fd: of the file.
        parts: in the order of the file; what needs checksums comes after what gives them.
        offset: of the first part (bytes).
        staged: puts parts together.

    Raises:
        OSError: the disk is full or failed.
        StorageChangedError: a storage was resized meanwhile.
    """
    together: list[Part] = []
    gathered = 0  # bytes in `together`
    pieces: list[memoryview] = []
    queued = 0  # bytes in `pieces`

    def put(piece: memoryview) -> None:
        nonlocal queued
        pieces.append(piece)
        queued += len(piece)
        if queued >= _CHUNK or len(pieces) == _MOST_PIECES:
            write()

    def write() -> None:
        nonlocal offset, queued
        write_all(fd, pieces, offset)
        offset += queued
        queued = 0
        pieces.clear()

    for part in (*parts, None):
        data = _uncopied(part) if part is not None else None
        if part is not None and data is None:
            together.append(part)
            gathered += part.length
            if gathered < _CHUNK:
                continue
        if together:
            put(_known(together) or memoryview(staged(together)))
            together, gathered = [], 0
        if part is not None and data is not None:
            crc = 0
            for start in range(0, part.length, _CHUNK):
                piece = data[start : start + _CHUNK]
                if part.ledger is not None:
                    crc = crc32(piece, crc)
                put(piece)
            _enter(part, crc)
    if pieces:
        write()
    _check(parts)


def _known(parts: Sequence[Part]) -> memoryview | None:
    """Return the bytes of parts that are a single literal."""
    source, start, length, _ = parts[0]
    if len(parts) > 1 or not isinstance(source, Literal):
        return None
    return memoryview(source.data)[start : start + length]


def _uncopied(part: Part) -> memoryview | None:
    """Return the memory of a part that can be written from where it is."""
    source, start, length, _ = part
    if length < _UNCOPIED or not isinstance(source, Data):
        return None
    memory = source.memory
    if not isinstance(memory, HostMemory):
        return None
    if isinstance(memory, StorageOnHost) and memory.shared:
        return None  # others may change it between checksum and write, or resize it
    return memoryview((ctypes.c_char * length).from_address(memory.address + start))


def _enter(part: Part, crc: int) -> None:
    source, start, length, ledger = part
    if ledger is not None and isinstance(source, Data) and source.record is not None:
        ledger.add(source.record, start, length, crc)


def _check(parts: Sequence[Part]) -> None:
    for part in parts:
        if isinstance(part.source, Data) and isinstance(part.source.memory, StorageOnHost):
            part.source.memory.check()


def write_all(fd: int, pieces: Sequence[memoryview], offset: int) -> None:
    """Write pieces one behind the other from byte `offset` on.

    Raises:
        OSError: the disk is full or failed.
    """
    rest = list(pieces)
    while rest:
        written = os.pwritev(fd, rest, offset)
        if written == 0:
            raise OSError(errno.EIO, f"{sum(map(len, rest))} bytes were not written")
        offset += written
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = rest[0][written:]
