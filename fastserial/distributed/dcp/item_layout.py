"""What surrounds a tensor's bytes: nothing, or the archive that `torch.save` of it would write.

In stock's format each tensor is such an archive in the middle of a rank's file. Archives of
tensors that are alike differ in the data, one CRC-32 (at two places) and the serialization id that
comes from it. So torch pickles one tensor of a kind, over memory that is never touched; for all
others a few bytes are put in.
"""

from __future__ import annotations

import functools
import pickle
import struct
from typing import Any, NamedTuple

import torch

from fastserial.checksums import crc32
from fastserial.errors import LayoutError
from fastserial.formats.extents import Data, DescriptorPatch, Literal, Trailer
from fastserial.formats.zip.layout import ZipLayout, ZipPlan, fold
from fastserial.formats.zip.structs import CENTRAL, DESCRIPTOR_SIGNATURE, END64, END_BYTES
from fastserial.memory.storages import HostMemory
from fastserial.memory.untouched import Untouched
from fastserial.saving import torch_writer

__all__ = ["NO_CONTAINER", "Frame", "frame_of"]

_ARCHIVE = "archive"  # torch's name for what goes to a stream
_PROTOCOL = 2  # torch.save's default
_CRC = struct.Struct("<I")
_CRC_IN_DESCRIPTOR = 4
_CRC_IN_CENTRAL = 16
_DIGITS = 20


class _Seal(NamedTuple):
    """Where the tail of a frame differs between tensors that are alike (bytes).

    Attributes:
        checksums: whether there are CRC-32s; else they are 0.
        central: the place of the data's CRC-32 in the directory.
        text: the place of the serialization id,
        text_central: and of its CRC-32 in the directory.
        seed: what torch folds the checksums of the records before the data into,
        after: and the checksums of those behind it.
    """

    checksums: bool
    central: int
    text: int
    text_central: int
    seed: int
    after: tuple[int, ...]


class Frame:
    """The bytes before and after a tensor's data.

    Attributes:
        head: before the data.
        tail_nbytes: how many are behind it.
    """

    __slots__ = ("_seal", "_tail", "head", "tail_nbytes")

    def __init__(self, head: bytes, tail: bytes, seal: _Seal | None) -> None:
        """Keep a frame; without a `seal` the tail is the same for any data."""
        self.head = head
        self.tail_nbytes = len(tail)
        self._tail = tail
        self._seal = seal

    def tail(self, crc: int, lookalike: int | None = None) -> bytes:
        """Return the bytes behind the data.

        Args:
            crc: CRC-32 of the data; 0 without checksums.
            lookalike: what torch takes for a checksum in the data's first bytes (`lookalike_of`).
        """
        seal = self._seal
        if seal is None:
            return self._tail
        combined = seal.seed
        if lookalike is not None:
            combined = fold(combined, lookalike)
        combined = fold(combined, crc)
        for value in seal.after:
            combined = fold(combined, value)
        text = bytearray(self._tail)
        digits = b"%020d" % combined
        start = seal.text + _DIGITS
        text[start : start + _DIGITS] = digits
        if seal.checksums:
            id_crc = crc32(text[seal.text : start + _DIGITS])
            _CRC.pack_into(text, _CRC_IN_DESCRIPTOR, crc)
            _CRC.pack_into(text, seal.central, crc)
            _CRC.pack_into(text, start + _DIGITS + _CRC_IN_DESCRIPTOR, id_crc)
            _CRC.pack_into(text, seal.text_central, id_crc)
        return bytes(text)


NO_CONTAINER = Frame(b"", b"", None)


@functools.lru_cache(maxsize=1024)
def frame_of(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    alignment: int,
    checksums: bool,
) -> Frame:
    """Return what `torch.save` would put around the bytes of a tensor that is alone in its storage.

    Args:
        dtype, shape, strides: of the tensor.
        alignment: of the data, in the archive (bytes).
        checksums: whether there are CRC-32s.

    Raises:
        LayoutError: torch writes more than the tensor and the records it always writes.
    """
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    untouched = Untouched(nbytes, 1)
    try:
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        tensor.set_(untouched.storage(nbytes), 0, shape, strides)
        archive = _Archive(alignment, checksums)
        save: Any = torch.serialization._save
        save(tensor, archive, pickle, _PROTOCOL, False)
        del tensor
    finally:
        untouched.close()
    return _frame_of_plan(torch_writer.finish(archive.layout), archive)


class _Archive:
    """Stands where torch's PyTorchFileWriter stands: takes the records, and writes nothing."""

    def __init__(self, alignment: int, checksums: bool) -> None:
        self.layout = ZipLayout(_ARCHIVE, alignment, checksums)
        self.data_record = -1

    def archive_name(self) -> str:
        return _ARCHIVE

    def write_record(self, name: str, data: Any, size: int) -> None:
        if isinstance(data, str):
            data = data.encode()
        if isinstance(data, bytes | bytearray | memoryview):
            text = bytes(data[:size])
            self.layout.add_bytes(name, text, crc32(text))
            return
        if self.data_record >= 0:
            raise LayoutError("torch saves one tensor with several storages")
        self.data_record = len(self.layout.names)
        self.layout.add_memory(name, HostMemory(0, size, data), b"")


def _frame_of_plan(plan: ZipPlan, archive: _Archive) -> Frame:
    data = next((i for i, e in enumerate(plan.extents) if isinstance(e.source, Data)), None)
    if data is None:  # an empty tensor
        return Frame(_bytes_of(plan, len(plan.extents)), b"", None)
    head = _bytes_of(plan, data)
    crcs = [crc or 0 for crc in plan.crcs]
    tail = b""
    for extent in plan.extents[data + 1 :]:
        source = extent.source
        if isinstance(source, Literal | DescriptorPatch):
            tail += source.data
        elif isinstance(source, Trailer):
            tail += source.make(crcs)
        else:
            raise LayoutError("torch writes something behind the data that is not known")
    record, last = archive.data_record, len(plan.sizes) - 1
    seed = 0
    for crc, size in zip(crcs[:record], plan.sizes, strict=False):
        seed = fold(seed, crc) if size else seed
    after = zip(crcs[record + 1 : last], plan.sizes[record + 1 : last], strict=True)
    directory = _directory_start(tail)
    centrals = _central_entries(tail, directory)
    return Frame(
        head,
        tail,
        _Seal(
            archive.layout.checksums,
            centrals[record] + _CRC_IN_CENTRAL,
            tail.rindex(DESCRIPTOR_SIGNATURE, 0, directory) - 2 * _DIGITS,
            centrals[last] + _CRC_IN_CENTRAL,
            seed,
            tuple(crc for crc, size in after if size),
        ),
    )


def _bytes_of(plan: ZipPlan, count: int) -> bytes:
    sources = [extent.source for extent in plan.extents[:count]]
    if not all(isinstance(source, Literal) for source in sources):
        raise LayoutError("torch writes something before the data that is not known")
    return b"".join(bytes(source.data) for source in sources if isinstance(source, Literal))


def _directory_start(tail: bytes) -> int:
    end = len(tail) - END_BYTES
    nbytes: int = END64.unpack_from(tail, end)[8]
    return end - nbytes


def _central_entries(tail: bytes, start: int) -> list[int]:
    """Return where the entry of each record begins."""
    found: list[int] = []
    at = start
    while at < len(tail) - END_BYTES:
        fields = CENTRAL.unpack_from(tail, at)
        found.append(at)
        at += CENTRAL.size + sum(fields[10:13])
    return found
