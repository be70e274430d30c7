"""A stored tensor: its chunks, and where the bytes of each are.

A tensor in a file of `torch.save` or of safetensors has one chunk, one in a folder of
torch.distributed.checkpoint has several, each in a file. What reads, checks or converts tensors
sees no more of a format than that.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from operator import lt
from typing import NamedTuple

from fastserial.checksums import check_crc, crc32
from fastserial.errors import CorruptCheckpointError
from fastserial.formats.outline import zip_outline
from fastserial.formats.source import BytesSource, Source
from fastserial.formats.tensors import ITEM_BYTES, contiguous_stride, element_count
from fastserial.formats.zip_format import (
    END,
    END_SIGNATURE,
    LOCAL_SIGNATURE,
    RecordEntry,
    all_checksums,
    read_places,
    read_record,
)

OF_ANOTHER = "it is that of another checkpoint"
_EDGE = 4096  # bytes; more than any record of an archive but the data of its tensor


class Box(NamedTuple):
    """The elements from `offsets` on, `sizes` of them along each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements there are; 1 for a tensor without dimensions."""
        return prod(self.sizes)

    def contains(self, part: Box) -> bool:
        """Return whether a box is a part of this one."""
        ends = zip(*self, *part, strict=True)
        return all(low <= first and first + n <= low + size for low, size, first, n in ends)

    def slices(self, whole: Box) -> tuple[slice, ...]:
        """Return the index of this box in a tensor that holds `whole`."""
        return tuple(
            slice(offset - base, offset - base + size)
            for offset, size, base in zip(self.offsets, self.sizes, whole.offsets, strict=True)
        )


def whole_box(shape: tuple[int, ...]) -> Box:
    """Return the box of all elements of a tensor."""
    return Box((0,) * len(shape), shape)


class Chunk(NamedTuple):
    """A stored part of a tensor, or in a folder a pickled value.

    Attributes:
        box: its elements; None: it is a value.
        dtype: name of their type, such as `float32`; None: it is a value.
        file: name of its file in the folder; empty: there is only one, or nobody says which.
        offset, length: where its bytes are in the file: its elements, or an archive with them.
        start: where the elements begin in these bytes; None: the archive has to be read for it.
        strides: of the elements there; None: they are contiguous.
        crc: CRC-32 of the elements' bytes, of a value of all bytes; None: unknown.
        is_extended: an extension of stock's writer, such as a compression, processed it.
        key: of the tensor or value, where errors need it.
    """

    box: Box | None
    dtype: str | None
    file: str
    offset: int
    length: int
    start: int | None = 0
    strides: tuple[int, ...] | None = None
    crc: int | None = None
    is_extended: bool = False
    key: str = ""

    @property
    def name(self) -> str:
        """Its name in errors."""
        if self.box is None or not any(self.box.offsets):
            return self.key
        return f"{self.key} at {list(self.box.offsets)}"

    @property
    def elements(self) -> Box:
        """The box of a tensor's elements."""
        return self.box or Box((), ())

    def is_all_of(self, shape: tuple[int, ...]) -> bool:
        """Return whether it has all elements of a tensor of this shape."""
        offsets, sizes = self.elements
        return sizes == shape and not any(offsets)

    @property
    def nbytes(self) -> int | None:
        """Bytes of its elements; None if it is a value, or of a dtype that is not known here."""
        if self.box is None or self.dtype not in ITEM_BYTES:
            return None
        return self.box.numel * ITEM_BYTES[self.dtype]

    @property
    def stride(self) -> tuple[int, ...]:
        """The strides of its elements."""
        return self.strides or contiguous_stride(self.elements.sizes)

    def located(self, item: Source) -> Chunk | None:
        """Return it with `start`; None if only `torch.load` can read it.

        An archive has the last word on dtype, strides and CRC-32.

        Args:
            item: its bytes.

        Raises:
            CorruptCheckpointError: it has fewer bytes or elements than its shape says, or what
                surrounds the elements is damaged.
        """
        if self.box is None or self.is_extended:
            return None
        if self.start is None:
            return self._in_archive(self.box, item)
        if self.start + (self.nbytes or 0) > item.size:
            raise CorruptCheckpointError("it has fewer bytes than its shape needs")
        return self if self.nbytes is not None else None

    def _in_archive(self, box: Box, item: Source) -> Chunk | None:
        """Return what an archive has, if that is one tensor that fills its storage."""
        if item.read_at(0, min(len(LOCAL_SIGNATURE), item.size)) != LOCAL_SIGNATURE:
            return None
        directory = read_places(item)
        found, order = zip_outline(item, directory), directory.find("byteorder")
        if found is None or len(found.tensors) != 1 or found.problems:
            return None
        (tensor,) = found.tensors
        record = directory.find(f"data/{tensor.storage}")
        if (
            order is None
            or order.size != len("little")
            or record is None
            or not record.is_stored
            or (tensor.kind, tensor.key) != ("tensor", "")
            or tensor.span != (0, record.size)
            or tensor.nbytes != record.size
        ):
            return None
        edges = [one for one in directory.records if one is not record and one.size <= _EDGE]
        _check_records(item, edges)
        if len(tensor.shape) != len(box.sizes) or any(map(lt, tensor.shape, box.sizes)):
            raise CorruptCheckpointError(OF_ANOTHER)
        return self._replace(
            dtype=tensor.dtype,
            start=record.data_offset,
            strides=tensor.stride,
            crc=record.crc or None if tensor.shape == box.sizes else None,  # stock takes a part
        )


def check_archive(data: bytes) -> bool:
    """Compare the CRC-32s in an archive with its records; return whether all records have one.

    Raises:
        CorruptCheckpointError: one is wrong.
    """
    if not data.startswith(LOCAL_SIGNATURE) and data[-END.size :][:4] != END_SIGNATURE:
        return False
    source = BytesSource(data)
    directory = read_places(source, headers=True)
    _check_records(source, directory.records)
    return all_checksums(directory)


def _check_records(archive: Source, records: Iterable[RecordEntry]) -> None:
    for record in records:
        if record.crc:
            found = crc32(read_record(archive, record, max(archive.size, _EDGE)))
            check_crc(found, record.crc, record=record.name)


class StoredTensor(NamedTuple):
    """A tensor: name of its dtype (`float32`), shape, and its chunks."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return element_count(self.shape) or 0

    @property
    def held(self) -> int:
        """How many elements its chunks have."""
        return sum(chunk.box.numel for chunk in self.chunks if chunk.box is not None)
