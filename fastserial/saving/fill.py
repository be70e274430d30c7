"""Fills memory with extents of a layout, and checksums each chunk while it is in the cache.

Small storages are packed: a few calls for hundreds of them, instead of a few for each.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import TYPE_CHECKING

from fastserial.checksums import CrcLedger, crc32
from fastserial.config.performance import FILL_CHUNK
from fastserial.engines import Request
from fastserial.errors import LayoutError
from fastserial.formats.extents import (
    Data,
    DescriptorPatch,
    Extent,
    Literal,
    Made,
    Packed,
    Trailer,
)
from fastserial.formats.zip_format import DESCRIPTOR_SIGNATURE
from fastserial.memory.storages import DeviceMemory, StorageMemory

if TYPE_CHECKING:
    from fastserial.memory.buffers import Ring


_CRC = struct.Struct("<I")


@dataclass(slots=True)
class BlockContent:
    """What fills a block.

    Attributes:
        extents: that fill it, in the order of the file, at offsets in the file.
        length: bytes of them all.
        ledger: collects and gives the CRC-32s; None: none are wanted.
        files: keeps the descriptors open.
        ring: copies device memory to the buffer; None: there is none of it, or it does not pass
            through the host.
    """

    extents: list[Extent]
    length: int
    ledger: CrcLedger | None
    files: object
    ring: Ring | None = None


def fill_request(request: Request) -> None:
    """Fill a block's buffer. If that fails, no thread is left waiting for its checksums."""
    block: BlockContent = request.tag
    try:
        if block.ring is not None:
            block.ring.arrive(request.buffer)
        buffer, copied = request.buffer, block.ring is not None
        fill(block.extents, block.ledger, buffer.view, buffer.address, copied)
    except BaseException as error:
        if block.ledger is not None:
            block.ledger.fail(error)
        raise


def device_copies(extents: Sequence[Extent]) -> Iterator[tuple[int, DeviceMemory, int, int]]:
    """Yield the copies from devices that `fill` needs, as `Ring.fetch` takes them."""
    at = 0
    for _, length, source, start in extents:
        if isinstance(source, Data) and isinstance(source.memory, DeviceMemory):
            yield at, source.memory, start, length
        at += length


def device_memory(extents: Sequence[Extent]) -> tuple[StorageMemory, bool] | None:
    """Return the device memory that is all of a block, and whether its CRC-32 is wanted.

    None: the block has other content.
    """
    source = extents[0].source
    if len(extents) > 1 or not isinstance(source, Data):
        return None
    memory = source.memory
    return (memory, source.record is not None) if isinstance(memory, StorageMemory) else None


def fill(
    extents: Iterable[Extent],
    ledger: CrcLedger | None,
    view: memoryview,
    address: int,
    copied: bool = False,
) -> None:
    """Put the bytes of extents back to back at `address`, which `view` shows.

    Extents that need checksums are filled last: they may wait for threads that fill earlier blocks.

    Args:
        extents: what is copied.
        ledger: collects and gives the CRC-32s.
        view, address: the memory, of at least as many bytes.
        copied: the `device_copies` are made already.
    """
    at = 0
    late: list[tuple[int, Extent]] = []
    for extent in extents:
        _, length, source, start = extent
        if isinstance(source, Data):
            _fill_data(source, extent, ledger, view[at : at + length], address + at, copied)
        elif isinstance(source, Packed):
            make = partial(_packed, source, ledger)
            view[at : at + length] = source.whole.piece(make, source.length, start, length)
        elif isinstance(source, Literal):
            view[at : at + length] = source.data[start : start + length]
        else:
            late.append((at, extent))
        at += length
    for at, extent in late:
        view[at : at + extent.length] = _late_bytes(extent, ledger)


def _late_bytes(extent: Extent, ledger: CrcLedger | None) -> bytes | bytearray:
    """Return the bytes of an extent that may need checksums."""
    _, length, source, start = extent
    if isinstance(source, Made):
        return source.piece(start, length)
    if ledger is None:
        raise LayoutError("a source that needs checksums came without a ledger")
    text: bytes | bytearray
    if isinstance(source, DescriptorPatch):
        text = bytearray(source.data)
        _CRC.pack_into(text, source.at, ledger.wait(source.record))
    elif isinstance(source, Trailer):
        text = source.data(ledger.wait_all())
    else:
        raise LayoutError(f"no bytes can be written of {source!r}")
    return text[start : start + length]


def _fill_data(
    source: Data,
    extent: Extent,
    ledger: CrcLedger | None,
    view: memoryview,
    address: int,
    copied: bool,
) -> None:
    """Copy a storage's bytes to `address`, which `view` shows, chunk by chunk, with their CRC."""
    _, length, _, start = extent
    record = source.record if ledger is not None else None
    memory = source.memory
    copy_to = memory.copy_to
    if copied and isinstance(memory, DeviceMemory):
        memory.check()
        copy_to = _do_not_copy
    crc = 0
    step = max(1, length) if record is None else FILL_CHUNK
    for done in range(0, length, step):
        size = min(step, length - done)
        copy_to(address + done, start + done, size)
        if record is not None:
            crc = crc32(view[done : done + size], crc)
    if ledger is not None and record is not None:
        ledger.add(record, start, length, crc)


def _do_not_copy(address: int, start: int, length: int) -> None:
    """Stand in for a copy that was made already."""


def _packed(source: Packed, ledger: CrcLedger | None) -> bytes:
    """Return the bytes of a pack, copied twice, but by few calls; enter their CRC-32s."""
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
    text = b"".join(parts)
    if ledger is not None and source.first is not None:
        ledger.add_many(source.first, crcs)
    return text
