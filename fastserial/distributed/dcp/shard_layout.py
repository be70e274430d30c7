"""The layout of a rank's file: one item after the other, each tensor an archive of `torch.save`.

torch pickles one tensor of each kind, over memory that is never touched. Archives of similar
tensors differ only in the data and in what follows from its CRC-32.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from fastserial.checkpoints.tensor_read import is_dense
from fastserial.checksums import CrcLedger, crc32
from fastserial.distributed.comm.exchange import GatheredMemory
from fastserial.distributed.dcp.folder import storage_info
from fastserial.errors import LayoutError
from fastserial.formats.dcp import Known
from fastserial.formats.extents import Data, DescriptorPatch, Extent, Literal, Made, Trailer
from fastserial.formats.zip_layout import ZipLayout
from fastserial.interrupts import cleanup, ours
from fastserial.memory.address_reservation import AddressReservation
from fastserial.memory.storages import HostMemory, Memory, StorageMemory, is_on_host
from fastserial.patching.self_check import self_check
from fastserial.saving.archive import checksums_wanted, finish_layout, storage_alignment

_ARCHIVE = "archive"  # torch's name for what goes to a stream
_PROTOCOL = 2  # torch.save's default


class TensorBytes(NamedTuple):
    """A tensor as it is written to a file.

    Attributes:
        memory: its bytes, in the order in which they are saved.
        nbytes: how many.
        strides: of the tensor that is loaded from them (elements).
    """

    memory: Memory
    nbytes: int
    strides: tuple[int, ...]


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
        strides, storage = tensor.stride(), tensor.untyped_storage()
        memory: Memory
        if is_on_host(storage):
            memory = HostMemory(tensor.data_ptr(), nbytes, tensor)
        else:
            memory = StorageMemory(storage, int(tensor.storage_offset()) * tensor.itemsize)
        return TensorBytes(memory, nbytes, strides)
    if tensor.untyped_storage().nbytes() == nbytes:
        return None  # it is saved with its overlaps and gaps
    strides = torch.empty_like(tensor, device="meta").stride()
    memory = GatheredMemory(tensor.permute(outermost_first(strides)), 0, nbytes)
    return TensorBytes(memory, nbytes, strides)


def outermost_first(strides: Sequence[int]) -> list[int]:
    """Return the dimensions of a dense tensor in memory order."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


# -- the archive around a tensor -------------------------------------------------------------------


class Frame:
    """The bytes before and after a tensor's data.

    Attributes:
        head: before the data.
        tail_nbytes: how many bytes follow it.
    """

    def __init__(self, extents: Sequence[Extent], crcs: Sequence[int | None]) -> None:
        """Take the extents of an archive with one tensor, and the CRC-32s of its records."""
        sources = [extent.source for extent in extents]
        data = next((n for n, one in enumerate(sources) if isinstance(one, Data)), len(sources))
        self._crcs = crcs
        self._after = sources[data + 1 :]
        self.head = b"".join(bytes(one.data) for one in sources[:data] if isinstance(one, Literal))
        self.tail_nbytes = sum(one.length for one in self._after)

    def tail(self, crc: int) -> bytes:
        """Return the bytes behind the data, whose CRC-32 is `crc`."""
        crcs = [crc if known is None else known for known in self._crcs]
        parts: list[bytes] = []
        for source in self._after:
            if isinstance(source, Trailer):
                parts.append(source.make(crcs))
            elif isinstance(source, Literal):
                parts.append(bytes(source.data))
            elif isinstance(source, DescriptorPatch):
                digits, at = crc.to_bytes(4, "little"), source.at
                parts.append(source.data[:at] + digits + source.data[at + 4 :])
        return b"".join(parts)


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
        LayoutError: torch writes a tensor with several storages.
    """
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    reserved = AddressReservation(nbytes, 1)
    with cleanup(reserved.close):
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        tensor.set_(reserved.storage(nbytes), 0, shape, strides)
        archive = _RecordLayout(ZipLayout(_ARCHIVE, alignment, checksums))
        save: Any = torch.serialization._save
        save(tensor, archive, pickle, _PROTOCOL, False)
        del tensor
    plan = finish_layout(archive.layout)
    return Frame(plan.extents, plan.crcs)


class _RecordLayout:
    """Takes records in place of torch's PyTorchFileWriter, and writes nothing."""

    def __init__(self, layout: ZipLayout) -> None:
        self.layout = layout
        self._has_data = False

    def archive_name(self) -> str:
        return _ARCHIVE

    def write_record(self, name: str, data: Any, size: int) -> None:
        if isinstance(data, str):
            data = data.encode()
        if isinstance(data, bytes | bytearray | memoryview):
            text = bytes(data[:size])
            self.layout.add_bytes(name, text, crc32(text))
            return
        if self._has_data:
            raise LayoutError("torch saves one tensor with several storages")
        self._has_data = True
        self.layout.add_memory(name, HostMemory(0, size, None), b"")


# -- the file --------------------------------------------------------------------------------------


class _TensorSums:
    """Sizes and checksums of a batch's tensors. It refers to no memory, which would stay else."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.ledger = CrcLedger((), ())


class ItemBatch:
    """Items that are written together.

    Attributes:
        extents, nbytes: of them, from byte 0 on.
        storages: of the tensors.
        sums: their checksums.
    """

    def __init__(self) -> None:
        self.extents: list[Extent] = []
        self.nbytes = 0
        self.storages: list[torch.UntypedStorage] = []
        self.sums = _TensorSums()

    def put(self, source: Literal | Data | Made) -> None:
        """Append bytes."""
        self.extents.append(Extent(self.nbytes, source.length, source))
        self.nbytes += source.length


@dataclass(slots=True)
class _PlacedItem:
    """An item that was laid out (bytes).

    Attributes:
        start, strides: as in `Known`; without `start` the reader has to parse the archive.
        crc: of the tensor's bytes, or of an item of bytes, once they are written.
    """

    item: WriteItem
    offset: int
    length: int
    start: int | None
    strides: tuple[int, ...] | None = None
    crc: int = 0


class ShardLayout:
    """Lays items out one after the other. `take` returns what is to be written next."""

    def __init__(
        self, name: str, bytes_of: Callable[[torch.Tensor], TensorBytes | None] = bytes_of
    ) -> None:
        """Start an empty file.

        Args:
            name: of the file, as `.metadata` gives it.
            bytes_of: says where the bytes of tensors are.
        """
        self._bytes_of = bytes_of
        self._name = name
        self._checksums = checksums_wanted()
        self._alignment = storage_alignment()
        self._is_zip_known = _is_zip_known()
        self._end = 0
        self._placed: list[_PlacedItem] = []
        self._batch = ItemBatch()

    def add(self, item: WriteItem, data: torch.Tensor | io.BytesIO, planned: bool = True) -> None:
        """Append an item; its memory must stay as it is until the batch is written.

        Args:
            planned: what the item says of a tensor is what `.metadata` says of it.

        Raises:
            LayoutError: a sparse tensor, of which stock's reader would leave zeros.
        """
        if not isinstance(data, torch.Tensor):
            self._add_bytes(item, bytes(data.getbuffer()), 0)
            return
        tensor = data.detach()
        if tensor.layout is not torch.strided:
            raise LayoutError(
                f"{item.index.fqn}: its layout is {tensor.layout}, which stock cannot load: "
                "save it dense"
            )
        found = self._bytes_of(tensor) if self._is_zip_known else None
        frame = self._frame(tensor, found) if found is not None else None
        if found is None or frame is None:
            self._add_bytes(item, _saved_by_torch(tensor), None)
        else:
            self._add_tensor(item, tensor, found, frame, planned and _is_as_planned(item, tensor))

    def take(self) -> ItemBatch:
        """Return what was laid out since the last call."""
        batch, self._batch = self._batch, ItemBatch()
        sizes = batch.sums.sizes
        batch.sums.ledger = CrcLedger(sizes, [None] * len(sizes))
        return batch

    def results(self) -> list[WriteResult]:
        """Return where the items are, once all of them are written."""
        return [self._result(placed) for placed in self._placed]

    def _result(self, placed: _PlacedItem) -> WriteResult:
        known = None
        if placed.start is not None:
            known = Known(placed.start, placed.crc if self._checksums else None, placed.strides)
        info = storage_info(self._name, placed.offset, placed.length, known)
        return WriteResult(index=placed.item.index, size_in_bytes=placed.length, storage_data=info)

    def _frame(self, tensor: torch.Tensor, found: TensorBytes) -> Frame | None:
        """Return what surrounds a tensor's bytes; None if only torch knows."""
        kind = tensor.dtype, tensor.shape, found.strides
        try:
            return frame_of(*kind, self._alignment, self._checksums)
        except ours(LayoutError):
            return None

    def _place(
        self,
        item: WriteItem,
        length: int,
        start: int | None,
        strides: tuple[int, ...] | None = None,
    ) -> _PlacedItem:
        placed = _PlacedItem(item, self._end, length, start, strides)
        self._placed.append(placed)
        self._end += length
        return placed

    def _add_bytes(self, item: WriteItem, data: bytes, start: int | None) -> None:
        self._place(item, len(data), start).crc = crc32(data) if self._checksums else 0
        self._batch.put(Literal(data))

    def _add_tensor(
        self,
        item: WriteItem,
        tensor: torch.Tensor,
        found: TensorBytes,
        frame: Frame,
        planned: bool,
    ) -> None:
        batch, sums, checksums = self._batch, self._batch.sums, self._checksums
        nbytes, start = found.nbytes, len(frame.head)
        strides = None if tensor.is_contiguous() else found.strides
        length = start + nbytes + frame.tail_nbytes
        placed = self._place(item, length, start if planned else None, strides)
        batch.put(Literal(frame.head))
        if not nbytes:
            return
        record = len(sums.sizes)
        sums.sizes.append(nbytes)
        batch.storages.append(tensor.untyped_storage())

        def tail() -> bytes:
            if checksums:
                placed.crc = sums.ledger.wait(record)
            return frame.tail(placed.crc)

        batch.put(Data(found.memory, nbytes, record if checksums else None))
        batch.put(Made(frame.tail_nbytes, tail))


def _is_as_planned(item: WriteItem, tensor: torch.Tensor) -> bool:
    """Return whether `.metadata` has the dtype and shape of what is saved."""
    planned = item.tensor_data
    return (
        planned is not None
        and planned.properties.dtype == tensor.dtype
        and planned.chunk.sizes == tensor.shape
    )


def _saved_by_torch(tensor: torch.Tensor) -> bytes:
    """Return what stock writes of a tensor."""
    tensor = tensor.cpu()
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()


@functools.cache
def _is_zip_known() -> bool:
    """Return whether our zip layout is the one of this torch."""
    return self_check() is None
