"""Where the tensor is in an item, which is an archive of `torch.save`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from fastserial.checksums import check_crc, crc32
from fastserial.errors import (
    CorruptCheckpointError,
    FastserialError,
    TruncatedCheckpointError,
    UnreadableCheckpointError,
)
from fastserial.formats.dcp import Known
from fastserial.formats.source import BytesSource
from fastserial.formats.tensors import Outline, contiguous_stride, zip_outline
from fastserial.formats.zip_format import (
    END,
    END_SIGNATURE,
    LOCAL_SIGNATURE,
    Directory,
    all_checksums,
    read_places,
    read_record,
)

_EDGE = 4096  # bytes; more than what surrounds the data of a tensor
_MOST = 1024 * 1024  # bytes of a record other than the data

Peek = Callable[[int, int], bytes]


class ItemTensor(NamedTuple):
    """A tensor in an item.

    Attributes:
        start, nbytes: where its bytes are, counted from the item's first.
        dtype, shape, strides: of the tensor (elements).
        crc: CRC-32 of the bytes, None if it is unknown.
    """

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    crc: int | None


def tensor_in(
    peek: Peek,
    length: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    known: Known | None = None,
) -> ItemTensor | None:
    """Return the tensor in an item, None if only `torch.load` can read it.

    Args:
        peek: returns bytes of the item: (first, how many), or fewer at its end.
        length: of the item (bytes).
        dtype, shape: of the tensor, as `.metadata` has them.
        known: what our writer added there.

    Raises:
        CorruptCheckpointError: what surrounds the data is damaged.
    """
    if known is None or known.start is None:
        return _parsed(peek, length)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if known.start + nbytes > length:
        raise CorruptCheckpointError("it has fewer bytes than its shape needs")
    strides = known.strides or contiguous_stride(shape)
    return ItemTensor(known.start, nbytes, dtype, shape, strides, known.crc)


def check_archive(data: bytes, path: str, item: str) -> bool:
    """Compare the CRC-32s in an archive with its records; return whether all records have one.

    Raises:
        CorruptCheckpointError: one is wrong.
    """
    if not data.startswith(LOCAL_SIGNATURE) and data[-END.size :][:4] != END_SIGNATURE:
        return False
    source = BytesSource(data)
    try:
        directory = read_places(source)
    except UnreadableCheckpointError as error:
        error.path, error.record = path, item
        raise
    except FastserialError as error:
        raise CorruptCheckpointError(f"damaged: {error}", path=path, record=item) from error
    for record in directory.records:
        if record.crc:
            name = f"{item}: {record.name}"
            check_crc(crc32(read_record(source, record, len(data))), record.crc, path, name)
    return all_checksums(directory)


def _parsed(peek: Peek, length: int) -> ItemTensor | None:
    if peek(0, 4) != LOCAL_SIGNATURE:
        return None
    source = _Peeked(peek, length)
    directory = read_places(source)
    found = zip_outline(source, directory)
    content = _only_tensor(found, directory) if found is not None else None
    if content is None:
        return None
    for record in directory.records:
        if record.data_offset == content.start or record.size > _EDGE or not record.crc:
            continue
        check_crc(crc32(read_record(source, record, _MOST)), record.crc, record=record.name)
    return content


def _only_tensor(found: Outline, directory: Directory) -> ItemTensor | None:
    """Return the tensor of an archive if that is all it holds, and fills its storage."""
    order = directory.find("byteorder")
    if len(found.tensors) != 1 or found.problems or order is None or order.size != len("little"):
        return None
    tensor = found.tensors[0]
    record = directory.find(f"data/{tensor.storage}")
    plain = tensor.kind == "tensor" and not tensor.key
    if not plain or record is None or not record.is_stored:
        return None
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype) or tensor.span != (0, record.size):
        return None
    if tensor.nbytes != record.size:
        return None
    start = record.data_offset
    return ItemTensor(start, record.size, dtype, tensor.shape, tensor.stride, record.crc or None)


class _Peeked:
    """An item as a source."""

    def __init__(self, peek: Peek, length: int) -> None:
        self._peek = peek
        self._length = length

    @property
    def size(self) -> int:
        return self._length

    def read_at(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or offset + nbytes > self._length:
            raise TruncatedCheckpointError(f"the item ends at byte {self._length}")
        return self._peek(offset, nbytes)
