"""The bytes around a tensor's data: nothing, or the archive that `torch.save` of it would write.

In stock's format each tensor is such an archive in the middle of a rank's file. Archives of
similar tensors differ in the data and its CRC-32 only. So torch pickles one tensor of each kind,
over memory that is never touched, and the archive is made from its layout for all others.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from fastserial.checksums import crc32
from fastserial.errors import LayoutError
from fastserial.formats.extents import Data, DescriptorPatch, Extent, Literal, Trailer
from fastserial.formats.zip.layout import ZipLayout, ZipPlan
from fastserial.memory.storages import HostMemory
from fastserial.memory.untouched import Untouched
from fastserial.saving import torch_writer

__all__ = ["NO_FRAME", "Frame", "frame_of"]

_ARCHIVE = "archive"  # torch's name for what goes to a stream
_PROTOCOL = 2  # torch.save's default
_CRC_BYTES = 4


class Frame:
    """The bytes before and after a tensor's data.

    Attributes:
        head: before the data.
        tail_nbytes: how many bytes follow it.
    """

    __slots__ = ("_after", "_crcs", "_record", "head", "tail_nbytes")

    def __init__(
        self,
        head: bytes,
        after: Sequence[Extent] = (),
        crcs: Sequence[int] = (),
        record: int = 0,
    ) -> None:
        """Keep a frame.

        Args:
            after: the extents behind the data.
            crcs: the CRC-32 of each record of the archive.
            record: the index of the data's record.
        """
        self.head = head
        self.tail_nbytes = sum(extent.length for extent in after)
        self._after = [extent.source for extent in after]
        self._crcs = list(crcs)
        self._record = record

    def tail(self, crc: int) -> bytes:
        """Return the bytes behind the data, whose CRC-32 is `crc` (0 without checksums)."""
        crcs = self._crcs.copy()
        if crcs:
            crcs[self._record] = crc
        parts: list[bytes | memoryview] = []
        for source in self._after:
            if isinstance(source, DescriptorPatch):
                data, at = source.data, source.at
                crc_bytes = crcs[source.record].to_bytes(_CRC_BYTES, "little")
                parts += (data[:at], crc_bytes, data[at + _CRC_BYTES :])
            elif isinstance(source, Trailer):
                parts.append(source.make(crcs))
            elif isinstance(source, Literal):
                parts.append(source.data)
        return b"".join(parts)


NO_FRAME = Frame(b"")


@functools.lru_cache(maxsize=1024)
def frame_of(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    alignment: int,
    checksums: bool,
    first_bytes: bytes = b"",
) -> Frame:
    """Return what `torch.save` would put around the bytes of a tensor that is alone in its storage.

    Args:
        dtype, shape, strides: of the tensor.
        alignment: of the data, in the archive (bytes).
        checksums: whether there are CRC-32s.
        first_bytes: the first 8 bytes of the data if they begin like a zip data descriptor: torch
            takes them for one.

    Raises:
        LayoutError: torch writes more than the tensor and the records it always writes.
    """
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    untouched = Untouched(nbytes, 1)
    try:
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        tensor.set_(untouched.storage(nbytes), 0, shape, strides)
        archive = _RecordLayout(alignment, checksums, first_bytes)
        save: Any = torch.serialization._save
        save(tensor, archive, pickle, _PROTOCOL, False)
        del tensor
    finally:
        untouched.close()
    return _frame_of_plan(torch_writer.finish(archive.layout), archive.data_record)


class _RecordLayout:
    """Takes records in place of torch's PyTorchFileWriter, and writes nothing."""

    def __init__(self, alignment: int, checksums: bool, first_bytes: bytes) -> None:
        self.layout = ZipLayout(_ARCHIVE, alignment, checksums)
        self.data_record = -1
        self._first_bytes = first_bytes

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
        self.layout.add_memory(name, HostMemory(0, size, data), self._first_bytes)


def _frame_of_plan(plan: ZipPlan, data_record: int) -> Frame:
    extents = plan.extents
    data = next((i for i, e in enumerate(extents) if isinstance(e.source, Data)), len(extents))
    head = b""
    for extent in extents[:data]:
        if not isinstance(extent.source, Literal):
            raise LayoutError("torch writes something unknown before the data")
        head += extent.source.data
    after = extents[data + 1 :]
    if not all(isinstance(one.source, Literal | DescriptorPatch | Trailer) for one in after):
        raise LayoutError("torch writes something unknown behind the data")
    return Frame(head, after, [crc or 0 for crc in plan.crcs], data_record)
