"""Writing through the page cache, for little data: no engine, no pool, hardly a copy.

Large host storages go to the kernel from where they are; what is between them is gathered.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Iterator, Sequence

from fastserial import trace
from fastserial.checksums import crc32
from fastserial.config.performance import CACHED_CHUNK, MOST_PIECES, UNCOPIED
from fastserial.files.linux import pwritev
from fastserial.formats.extents import Data, Hole, Literal
from fastserial.memory.storages import HostMemory, StorageOnHost
from fastserial.saving.fill import Part, staged

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
    together: list[Part] = []
    gathered = 0  # bytes in `together`
    pieces: list[memoryview] = []
    queued = 0  # bytes in `pieces`,
    end = 0  # which end here in the file

    def put(piece: memoryview, offset: int) -> None:
        nonlocal queued, end
        if offset != end:
            write()
        pieces.append(piece)
        queued += len(piece)
        end = offset + len(piece)
        if queued >= CACHED_CHUNK or len(pieces) == MOST_PIECES:
            write()

    def write() -> None:
        nonlocal queued
        if pieces:
            write_all(fd, pieces, end - queued)
            queued = 0
            pieces.clear()

    def join() -> None:
        nonlocal gathered
        if together:
            put(_known(together) or memoryview(staged(together)), together[0].offset)
            together.clear()
            gathered = 0

    for part in parts:
        if isinstance(part.source, Hole):
            continue
        if together and part.offset != together[0].offset + gathered:
            join()
        data = _uncopied(part)
        if data is None:
            for chunk in _chunks(part):
                together.append(chunk)
                gathered += chunk.length
                if gathered >= CACHED_CHUNK:
                    join()
            continue
        join()
        crc = 0
        for start in range(0, part.length, CACHED_CHUNK):
            piece = data[start : start + CACHED_CHUNK]
            if part.ledger is not None:
                crc = crc32(piece, crc)
            put(piece, part.offset + start)
        _enter(part, crc)
    join()
    write()
    _check(parts)


def _chunks(part: Part) -> Iterator[Part]:
    """Cut what is gathered in memory, such as a part on a device: little is there at a time."""
    offset, source, start, length, ledger = part
    if length <= CACHED_CHUNK or not isinstance(source, Data | Literal):
        yield part
        return
    for done in range(0, length, CACHED_CHUNK):
        yield Part(offset + done, source, start + done, min(CACHED_CHUNK, length - done), ledger)


def _known(parts: Sequence[Part]) -> memoryview | None:
    """Return the bytes of parts that are a single literal."""
    _, source, start, length, _ = parts[0]
    if len(parts) > 1 or not isinstance(source, Literal):
        return None
    return memoryview(source.data)[start : start + length]


def _uncopied(part: Part) -> memoryview | None:
    """Return the memory of a part that can be written from where it is."""
    _, source, start, length, _ = part
    if length < UNCOPIED or not isinstance(source, Data):
        return None
    memory = source.memory
    if not isinstance(memory, HostMemory):
        return None
    if isinstance(memory, StorageOnHost) and memory.shared:
        return None  # others may change it between checksum and write, or resize it
    return memoryview((ctypes.c_char * length).from_address(memory.address + start))


def _enter(part: Part, crc: int) -> None:
    _, source, start, length, ledger = part
    if ledger is not None and isinstance(source, Data) and source.record is not None:
        ledger.add(source.record, start, length, crc)


def _check(parts: Sequence[Part]) -> None:
    for part in parts:
        if isinstance(part.source, Data) and isinstance(part.source.memory, StorageOnHost):
            part.source.memory.check()


def write_all(fd: int, pieces: Sequence[memoryview], offset: int) -> None:
    """Write pieces back to back from byte `offset` on.

    Raises:
        OSError: the disk is full or failed.
    """
    rest = list(pieces)
    while rest:
        written = pwritev(fd, rest, offset)
        if written == 0:
            raise OSError(errno.EIO, f"{sum(map(len, rest))} bytes were not written")
        offset += written
        while rest and written >= len(rest[0]):
            written -= len(rest.pop(0))
        if written:
            rest[0] = rest[0][written:]
