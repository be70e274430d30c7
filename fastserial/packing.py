"""Filling a block with small storages: a few calls for hundreds of them, not a few for each."""

from __future__ import annotations

from itertools import chain, repeat

from fastserial.checksums import CrcLedger, crc32
from fastserial.containers.extents import Packed
from fastserial.containers.zip import DESCRIPTOR_SIGNATURE
from fastserial.staging import memmove

__all__ = ["fill_packed"]

# Up to this many bytes on average, storages are copied together: twice, but without a step of
# Python's for each, and without giving up the interpreter's lock to another thread each time.
_JOINED = 8 * 1024


def fill_packed(
    source: Packed, ledger: CrcLedger | None, view: memoryview, address: int, at: int
) -> None:
    """Put the bytes of a pack at byte `at` of `view`, which shows the memory at `address`.

    Enters the CRC-32s in the ledger, if they are wanted.
    """
    known = ledger if source.first is not None else None
    if source.batch.shared or source.length <= _JOINED * len(source.sizes):
        crcs = _join(source, known is not None, view, at)
    else:
        crcs = _copy(source, known is not None, view, address, at)
    if known is not None and source.first is not None:
        known.add_many(source.first, crcs)


def _join(source: Packed, wanted: bool, view: memoryview, at: int) -> list[int]:
    sizes, seal = source.sizes, source.seal
    texts = source.batch.texts(source.begin, source.begin + len(sizes))
    crcs = list(map(crc32, texts)) if wanted else []
    if seal is None:
        parts = chain.from_iterable(zip(texts, source.gaps, strict=True))
    else:
        told = crcs if wanted else repeat(0, len(sizes))
        marks = repeat(DESCRIPTOR_SIGNATURE, len(sizes))
        seals = map(seal.pack, marks, told, sizes, sizes)
        parts = chain.from_iterable(zip(texts, seals, source.gaps, strict=True))
    view[at : at + source.length] = b"".join(parts)
    return crcs


def _copy(source: Packed, wanted: bool, view: memoryview, address: int, at: int) -> list[int]:
    crcs: list[int] = []
    crc = 0
    seal = source.seal
    batch, first = source.batch, source.begin
    last = first + len(source.sizes)
    addresses = batch.addresses[first:last]
    batch.check(first, last)
    for data, size, gap in zip(addresses, source.sizes, source.gaps, strict=True):
        end = at + size
        memmove(address + at, data, size)
        if wanted:
            crc = crc32(view[at:end])
            crcs.append(crc)
        text = seal.pack(DESCRIPTOR_SIGNATURE, crc, size, size) + gap if seal is not None else gap
        at = end + len(text)
        view[end:at] = text
    batch.check(first, last)
    return crcs
