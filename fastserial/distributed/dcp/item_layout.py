"""The bytes around a tensor's data: nothing, or the archive that `torch.save` of it would write.

In stock's format each tensor is such an archive in the middle of a rank's file. Archives of
similar tensors differ in the data, in its CRC-32 (at two places) and in the serialization id that
follows from it. So torch pickles one tensor of each kind, over memory that is never touched; for
all others these fields are filled in. That takes 2 µs; to make the end of the archive from its
layout takes 11 µs, half of what a save of thousands of small tensors takes.
"""

from __future__ import annotations

import functools
import pickle
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fastserial.checkpoints.tensor_read import is_dense
from fastserial.checksums import crc32
from fastserial.distributed.ranks.exchange import GatheredMemory
from fastserial.errors import LayoutError
from fastserial.formats.extents import Data, DescriptorPatch, Literal, Trailer
from fastserial.formats.zip_layout import ZipLayout, ZipPlan, fold, lookalike_of
from fastserial.memory.storages import HostMemory, Memory
from fastserial.memory.untouched import Untouched
from fastserial.saving.archive import finish_layout


class TensorBytes(NamedTuple):
    """A tensor as it is written to a file.

    Attributes:
        memory: its bytes, in the order in which they are saved.
        nbytes: how many.
        strides: of the tensor that is loaded from them (elements).
        address: of the memory on the host, 0 if the bytes are not contiguous there.
    """

    memory: Memory
    nbytes: int
    strides: tuple[int, ...]
    address: int


def bytes_of(tensor: torch.Tensor) -> TensorBytes | None:
    """Return the bytes that `torch.save` would write of a tensor alone in its storage.

    None if only torch can save it: a sparse tensor, a subclass, one with lazy conjugation.
    """
    if (
        type(tensor) is not torch.Tensor
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.is_nested
        or tensor.device.type == "meta"
    ):
        return None
    nbytes = tensor.numel() * tensor.itemsize
    dense = tensor.is_contiguous() or is_dense(tensor)
    if dense:
        strides = tensor.stride()
        if tensor.device.type == "cpu":
            address = tensor.data_ptr()
            return TensorBytes(HostMemory(address, nbytes, tensor), nbytes, strides, address)
    elif tensor.untyped_storage().nbytes() == nbytes:
        return None  # it is saved with its overlaps and gaps
    else:
        strides = torch.empty_like(tensor, device="meta").stride()
    memory = GatheredMemory(tensor.permute(outermost_first(strides)), 0, nbytes)
    return TensorBytes(memory, nbytes, strides, 0)


def outermost_first(strides: Sequence[int]) -> list[int]:
    """Return the dimensions of a dense tensor in memory order."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


_ARCHIVE = "archive"  # torch's name for what goes to a stream
_PROTOCOL = 2  # torch.save's default
_CRC = struct.Struct("<I")
_CRC_IN_DESCRIPTOR = 4
_MARKER = 0x5EA1_F00D  # instead of the data's CRC-32, to find where it stands
_DIGITS = 20


class _Fields(NamedTuple):
    """Where the tails of similar tensors differ (offsets in bytes).

    Attributes:
        checksums: whether there are CRC-32s; otherwise they are 0.
        central: of the data's CRC-32 in the directory.
        text, text_central: of the serialization id, and of its CRC-32 in the directory.
        seed: what torch makes of the checksums of the records before the data.
        after: the checksums of the records after it.
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
        tail_nbytes: how many bytes follow it.
    """

    __slots__ = ("_fields", "_tail", "head", "tail_nbytes")

    def __init__(self, head: bytes, tail: bytes, fields: _Fields | None) -> None:
        """Keep a frame; without `fields` the tail is the same for any data."""
        self.head = head
        self.tail_nbytes = len(tail)
        self._tail = tail
        self._fields = fields

    def tail(self, crc: int) -> bytes:
        """Return the bytes behind the data, whose CRC-32 is `crc` (0 without checksums)."""
        fields = self._fields
        if fields is None:
            return self._tail
        combined = functools.reduce(fold, (crc, *fields.after), fields.seed)
        text = bytearray(self._tail)
        digits = b"%020d" % combined
        start = fields.text + _DIGITS
        text[start : start + _DIGITS] = digits
        if fields.checksums:
            id_crc = crc32(text[fields.text : start + _DIGITS])
            _CRC.pack_into(text, _CRC_IN_DESCRIPTOR, crc)
            _CRC.pack_into(text, fields.central, crc)
            _CRC.pack_into(text, start + _DIGITS + _CRC_IN_DESCRIPTOR, id_crc)
            _CRC.pack_into(text, fields.text_central, id_crc)
        return bytes(text)


NO_FRAME = Frame(b"", b"", None)


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
        archive = _RecordLayout(alignment, checksums)
        save: Any = torch.serialization._save
        save(tensor, archive, pickle, _PROTOCOL, False)
        del tensor
    finally:
        untouched.close()
    return _frame_of_plan(finish_layout(archive.layout), archive, lookalike_of(first_bytes))


class _RecordLayout:
    """Takes records in place of torch's PyTorchFileWriter, and writes nothing."""

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


def _frame_of_plan(plan: ZipPlan, archive: _RecordLayout, lookalike: int | None) -> Frame:
    data = next((i for i, e in enumerate(plan.extents) if isinstance(e.source, Data)), None)
    if data is None:  # an empty tensor
        return Frame(_bytes_of(plan, len(plan.extents)), b"", None)
    head = _bytes_of(plan, data)
    record, last = archive.data_record, len(plan.sizes) - 1
    crcs = [crc or 0 for crc in plan.crcs]
    crcs[record] = _MARKER if archive.layout.checksums else 0
    tail = b""
    for extent in plan.extents[data + 1 :]:
        source = extent.source
        if isinstance(source, Literal | DescriptorPatch):
            tail += source.data
        elif isinstance(source, Trailer):
            tail += source.make(crcs)
        else:
            raise LayoutError("torch writes something unknown behind the data")
    seed = 0
    for crc, size in zip(crcs[:record], plan.sizes, strict=False):
        seed = fold(seed, crc) if size else seed
    after = zip(crcs[record + 1 : last], plan.sizes[record + 1 : last], strict=True)
    rest = tuple(crc for crc, size in after if size)
    combined = functools.reduce(fold, (crcs[record], *rest), seed)
    text = tail.index(b"%020d" % combined) - _DIGITS
    central = text_central = 0
    if archive.layout.checksums:
        central = tail.index(_CRC.pack(_MARKER))
        text_central = tail.rindex(_CRC.pack(crc32(tail[text : text + 2 * _DIGITS])))
    if lookalike is not None:
        seed = fold(seed, lookalike)
    fields = _Fields(archive.layout.checksums, central, text, text_central, seed, rest)
    return Frame(head, tail, fields)


def _bytes_of(plan: ZipPlan, count: int) -> bytes:
    sources = [extent.source for extent in plan.extents[:count]]
    if not all(isinstance(source, Literal) for source in sources):
        raise LayoutError("torch writes something unknown before the data")
    return b"".join(bytes(source.data) for source in sources if isinstance(source, Literal))
