"""Fills memory with parts of a layout; a chunk is checksummed while it is in the cache.

Small storages are packed: a few calls for hundreds of them, instead of a few for each.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING, NamedTuple

from fastserial import trace
from fastserial.checksums import CrcLedger, crc32
from fastserial.config.performance import CACHED_CHUNK, FILL_CHUNK, GATHERED_CHUNK, UNCOPIED
from fastserial.engines import Request
from fastserial.errors import LayoutError
from fastserial.formats.extents import (
    Data,
    DescriptorPatch,
    ExtentSource,
    Literal,
    Made,
    Packed,
    Trailer,
)
from fastserial.formats.zip.structs import DESCRIPTOR_SIGNATURE
from fastserial.memory.storages import HostMemory, StorageMemory, StorageOnHost

if TYPE_CHECKING:
    from fastserial.memory.buffers import Ring

__all__ = [
    "BlockContent",
    "ExtentPart",
    "fetches",
    "fill",
    "held",
    "is_borrowed",
    "lone_memory",
    "prepare",
    "staged",
    "write_all",
    "write_buffered",
]

_CRC = struct.Struct("<I")


class ExtentPart(NamedTuple):
    """A piece of an extent that is still to be written, and where its checksums are kept.

    Attributes:
        offset: in the file (bytes).
        source, start, length: `length` bytes of the source, from its byte `start` on.
        ledger: collects and gives the CRC-32s.
    """

    offset: int
    source: ExtentSource
    start: int
    length: int
    ledger: CrcLedger | None


@dataclass(slots=True)
class BlockContent:
    """What fills a block, and how.

    Attributes:
        parts, length: what fills it, so many bytes.
        files: keeps the descriptors open.
        ring: copies device memory to the buffer; None: there is none, or it goes past the host.
    """

    parts: list[ExtentPart]
    length: int
    files: object
    ring: Ring | None = None


@trace.traced("fill (rest)")
def prepare(request: Request) -> None:
    """Fill a block's buffer. If that fails, no thread is left waiting for its checksums."""
    block: BlockContent = request.tag
    try:
        if block.ring is not None:
            with trace.step("copy from the device (D2H)"):
                block.ring.arrive(request.buffer)
        there = block.ring is not None
        fill(block.parts, request.buffer.view, request.buffer.address, there)
    except BaseException as error:
        for part in block.parts:
            if part.ledger is not None:
                part.ledger.fail(error)
        raise


def fetches(parts: Sequence[ExtentPart]) -> Iterator[tuple[int, StorageMemory, int, int]]:
    """Yield the copies from devices for `fill`, as `Ring.fetch` takes them."""
    at = 0
    for part in parts:
        source = part.source
        if isinstance(source, Data) and isinstance(source.memory, StorageMemory):
            yield at, source.memory, part.start, part.length
        at += part.length


def lone_memory(parts: Sequence[ExtentPart]) -> tuple[StorageMemory, bool] | None:
    """Return the device's memory that the parts are a piece of, and whether its CRC-32 is wanted.

    None: something else is among them.
    """
    part, *others = parts
    source = part.source
    if others or not isinstance(source, Data) or not isinstance(source.memory, StorageMemory):
        return None
    return source.memory, source.record is not None and part.ledger is not None


def fill(
    parts: Sequence[ExtentPart], view: memoryview, address: int, fetched: bool = False
) -> None:
    """Put the bytes of the parts back to back at `address`, which `view` shows.

    Parts that need checksums are filled last: they may wait for threads that fill earlier blocks.

    Args:
        fetched: the `fetches` of the parts are there.
    """
    at = 0
    late: list[tuple[int, ExtentPart]] = []
    for part in parts:
        _, source, start, length, ledger = part
        if isinstance(source, Data):
            _fill_data(source, part, view, address, at, fetched)
        elif isinstance(source, Packed):
            if length == source.length:
                _fill_packed(source, ledger, view, at)
            else:
                view[at : at + length] = _packed_piece(source, ledger, start, length)
        elif isinstance(source, Literal):
            view[at : at + length] = source.data[start : start + length]
        else:
            late.append((at, part))
        at += length
    for at, (_, source, start, length, ledger) in late:
        if isinstance(source, Made):
            with trace.step("make"):
                view[at : at + length] = source.piece(start, length)
            continue
        if ledger is None:
            raise LayoutError("a source that needs checksums came without a ledger")
        if isinstance(source, DescriptorPatch):
            text: bytes | bytearray = bytearray(source.data)
            with trace.step("wait for checksums"):
                _CRC.pack_into(text, source.at, ledger.wait(source.record))
        elif isinstance(source, Trailer):
            with trace.step("wait for checksums"):
                crcs = ledger.wait_all()
            text = source.data(crcs)
        else:
            raise LayoutError(f"no such source: {source!r}")
        view[at : at + length] = text[start : start + length]


def _fill_data(
    source: Data,
    part: ExtentPart,
    view: memoryview,
    address: int,
    at: int,
    fetched: bool,
) -> None:
    _, _, start, length, ledger = part
    memory = source.memory
    wanted = source.record is not None and ledger is not None
    step = FILL_CHUNK if wanted else max(1, length)
    copy_to, checksum = memory.copy_to, crc32
    if fetched and isinstance(memory, StorageMemory):
        memory.check()
        copy_to = _is_there
    elif trace.listener is not None:
        near = isinstance(memory, HostMemory)
        copy_to = trace.traced("copy" if near else "copy from the device (D2H)")(copy_to)
    if trace.listener is not None:
        checksum = trace.traced("CRC-32")(checksum)
    crc = 0
    for done in range(0, length, step):
        size = min(step, length - done)
        copy_to(address + at + done, start + done, size)
        if wanted:
            crc = checksum(view[at + done : at + done + size], crc)
    if source.record is not None and ledger is not None:
        ledger.add(source.record, start, length, crc)


def _is_there(address: int, start: int, length: int) -> None:
    """Do nothing, in place of a copy that was made already."""


def _packed_piece(source: Packed, ledger: CrcLedger | None, start: int, length: int) -> bytes:
    """Return a part of a packed source that the end of a block cuts."""
    with source.lock:
        if source.made is None:
            source.made = staged([ExtentPart(0, source, 0, source.length, ledger)])
        piece = bytes(source.made[start : start + length])
        source.used += length
        if source.used == source.length:
            source.made = None
    return piece


def staged(parts: Sequence[ExtentPart]) -> bytearray:
    """Return the bytes of the parts, for what does not go through the pool."""
    whole = bytearray(sum(part.length for part in parts))
    if whole:
        address = ctypes.addressof(ctypes.c_char.from_buffer(whole))
        fill(parts, memoryview(whole), address)
    return whole


def is_borrowed(part: ExtentPart) -> bool:
    """Return whether a part needs memory that belongs to others."""
    if isinstance(part.source, Literal):
        return not isinstance(part.source.data, bytes)
    return isinstance(part.source, Data | Packed | Made)


def held(part: ExtentPart) -> Iterator[ExtentPart]:
    """Copy what a part needs, in pieces, because Python holds its lock while it allocates."""
    offset, source, start, length, ledger = part
    for done in range(0, length, FILL_CHUNK):
        size = min(FILL_CHUNK, length - done)
        data = bytes(staged([ExtentPart(offset + done, source, start + done, size, ledger)]))
        yield ExtentPart(offset + done, Literal(data), 0, size, None)


@trace.traced("pack small storages")
def _fill_packed(source: Packed, ledger: CrcLedger | None, view: memoryview, at: int) -> None:
    """Put the bytes of a pack at byte `at` of `view`: copied twice, but by few calls.

    Enters the CRC-32s in the ledger, if they are wanted.
    """
    wanted = ledger is not None and source.first is not None
    sizes, seal = source.sizes, source.seal
    texts = source.batch.texts(source.begin, source.begin + len(sizes))
    crcs = list(map(crc32, texts)) if wanted else []
    if seal is None:
        parts = chain.from_iterable(zip(texts, source.gaps, strict=True))
    else:
        values = crcs if wanted else repeat(0, len(sizes))
        marks = repeat(DESCRIPTOR_SIGNATURE, len(sizes))
        seals = map(seal.pack, marks, values, sizes, sizes)
        parts = chain.from_iterable(zip(texts, seals, source.gaps, strict=True))
    view[at : at + source.length] = b"".join(parts)
    if ledger is not None and source.first is not None:
        ledger.add_many(source.first, crcs)


@trace.traced("write (page cache)")
def write_buffered(fd: int, parts: Sequence[ExtentPart]) -> None:
    """Write parts to a file, in the order given.

    Args:
        fd: of the file.
        parts: those that need checksums follow those that give them.

    Raises:
        OSError: the disk is full or failed.
        StorageChangedError: a storage was resized during the save.
    """
    buffer = bytearray()
    together: list[ExtentPart] = []
    end = gathered = 0  # where they end in the file, and their bytes

    def write() -> None:
        nonlocal buffer, gathered
        if gathered > len(buffer):
            buffer = bytearray(max(gathered, min(total, GATHERED_CHUNK)))
        if together:
            address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
            view = memoryview(buffer)[:gathered]
            fill(together, view, address)
            write_all(fd, view, end - gathered)
            together.clear()
            gathered = 0

    total = sum([part.length for part in parts])
    for part in parts:
        memory = _memory_to_write(part)
        if memory is not None:
            write()
            _write_uncopied(fd, part, memory)
            end = part.offset + part.length
            continue
        for chunk in _chunks(part):
            if chunk.offset != end or gathered + chunk.length > GATHERED_CHUNK:
                write()
            together.append(chunk)
            gathered += chunk.length
            end = chunk.offset + chunk.length
    write()


def _chunks(part: ExtentPart) -> Iterator[ExtentPart]:
    """Cut a part up, so that little memory is taken at a time."""
    offset, source, start, length, ledger = part
    if length <= GATHERED_CHUNK or not isinstance(source, Data | Literal):
        yield part
        return
    for done in range(0, length, GATHERED_CHUNK):
        size = min(GATHERED_CHUNK, length - done)
        yield ExtentPart(offset + done, source, start + done, size, ledger)


def _memory_to_write(part: ExtentPart) -> HostMemory | None:
    """Return the memory of a part that can be written from where it is, and is worth the calls."""
    source = part.source
    if part.length < UNCOPIED or not isinstance(source, Data):
        return None
    memory = source.memory
    if not isinstance(memory, HostMemory):
        return None
    if isinstance(memory, StorageOnHost) and memory.shared:
        return None  # others may change it between checksum and write, or resize it
    return memory


def _write_uncopied(fd: int, part: ExtentPart, memory: HostMemory) -> None:
    offset, source, start, length, ledger = part
    view = memoryview((ctypes.c_char * length).from_address(memory.address + start))
    record = source.record if isinstance(source, Data) and ledger is not None else None
    crc = 0
    for done in range(0, length, CACHED_CHUNK):
        piece = view[done : done + CACHED_CHUNK]
        if record is not None:
            crc = crc32(piece, crc)
        write_all(fd, piece, offset + done)
    if isinstance(memory, StorageOnHost):
        memory.check()
    if ledger is not None and record is not None:
        ledger.add(record, start, length, crc)


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
