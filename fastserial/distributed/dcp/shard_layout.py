"""The layout of a rank's file: one item after the other, small ones written together.

Each tensor is an archive of `torch.save`.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from fastserial.checksums import CrcLedger, crc32
from fastserial.config.performance import PACKED_BYTES, PACKED_STORAGE
from fastserial.distributed.dcp.folder import storage_info
from fastserial.distributed.dcp.item_layout import NO_FRAME, Frame, TensorBytes, bytes_of, frame_of
from fastserial.errors import LayoutError
from fastserial.formats.dcp import Known
from fastserial.formats.extents import Data, Extent, Literal, Made
from fastserial.formats.zip_layout import lookalike_of
from fastserial.memory.storages import bytes_at, host_bytes
from fastserial.patching.self_check import self_check
from fastserial.saving.archive import checksums_wanted, storage_alignment

_HEAD = 8  # bytes of a tensor that torch may take for a data descriptor


class ItemBatch(NamedTuple):
    """What was laid out and is to be written next: `nbytes` in extents from byte 0 on."""

    extents: list[Extent]
    nbytes: int
    ledger: CrcLedger
    storages: list[torch.UntypedStorage]


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


class _SmallItem(NamedTuple):
    """An item that is written together with its neighbours.

    Attributes:
        placed: where it is.
        frame: what surrounds it.
        data: its bytes, or where they lie on the host; `nbytes` of them.
        owner: what keeps that memory alive.
    """

    placed: _PlacedItem
    frame: Frame
    data: bytes | int
    nbytes: int
    owner: object


class _LargeItems:
    """The large tensors of a batch; each has a record in the ledger of its checksums."""

    def __init__(self) -> None:
        self.placed: list[_PlacedItem] = []
        self.sizes: list[int] = []
        self.ledger = CrcLedger((), ())


class ShardLayout:
    """Lays items out one after the other. `take` returns what is to be written next."""

    def __init__(
        self,
        name: str,
        bytes_of: Callable[[torch.Tensor], TensorBytes | None] = bytes_of,
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
        self._batches: list[_LargeItems] = []
        self._start_batch()

    def _start_batch(self) -> None:
        self._start = self._end
        self._extents: list[Extent] = []
        self._storages: list[torch.UntypedStorage] = []
        self._small: list[_SmallItem] = []
        self._small_nbytes = 0
        self._large = _LargeItems()

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
        self._end_small()
        large = self._large
        large.ledger = CrcLedger(large.sizes, [None] * len(large.sizes))
        self._batches.append(large)
        batch = ItemBatch(self._extents, self._end - self._start, large.ledger, self._storages)
        self._start_batch()
        return batch

    def results(self) -> list[WriteResult]:
        """Return where the items are, once all of them are written."""
        for large in self._batches if self._checksums else ():
            for record, placed in enumerate(large.placed):
                placed.crc = large.ledger.wait(record)
        return [self._result(placed) for placed in self._placed]

    def _result(self, placed: _PlacedItem) -> WriteResult:
        known = None
        if placed.start is not None:
            known = Known(placed.start, placed.crc if self._checksums else None, placed.strides)
        info = storage_info(self._name, placed.offset, placed.length, known)
        return WriteResult(index=placed.item.index, size_in_bytes=placed.length, storage_data=info)

    # -- one item ------------------------------------------------------------------------------

    def _frame(self, tensor: torch.Tensor, found: TensorBytes) -> Frame | None:
        """Return what surrounds a tensor's bytes; None if only torch knows."""
        head = b""
        if found.nbytes >= _HEAD:
            address = found.address
            head = bytes_at(address, _HEAD) if address else host_bytes(found.memory, _HEAD)
            head = head if lookalike_of(head) is not None else b""
        kind = tensor.dtype, tensor.shape, found.strides
        try:
            return frame_of(*kind, self._alignment, self._checksums, head)
        except LayoutError:
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
        length = len(data)
        placed = self._place(item, length, start)
        if length <= PACKED_STORAGE:
            self._add_small(_SmallItem(placed, NO_FRAME, data, length, None))
            return
        self._end_small()
        placed.crc = crc32(data) if self._checksums else 0
        self._put(placed.offset, Literal(data))

    def _add_tensor(
        self,
        item: WriteItem,
        tensor: torch.Tensor,
        found: TensorBytes,
        frame: Frame,
        planned: bool,
    ) -> None:
        nbytes, head_nbytes = found.nbytes, len(frame.head)
        strides = None if tensor.is_contiguous() else found.strides
        start = head_nbytes if planned else None
        placed = self._place(item, head_nbytes + nbytes + frame.tail_nbytes, start, strides)
        if nbytes == 0 or (found.address and nbytes <= PACKED_STORAGE):
            self._add_small(_SmallItem(placed, frame, found.address, nbytes, tensor))
            return
        self._end_small()
        self._storages.append(tensor.untyped_storage())
        large, record = self._large, len(self._large.sizes)
        large.sizes.append(nbytes)
        large.placed.append(placed)
        self._put(placed.offset, Literal(frame.head))
        data = Data(found.memory, nbytes, record if self._checksums else None)
        self._put(placed.offset + head_nbytes, data)
        tail = functools.partial(self._tail, frame, large, record)
        self._put(self._end - frame.tail_nbytes, Made(frame.tail_nbytes, tail))

    def _tail(self, frame: Frame, large: _LargeItems, record: int) -> bytes:
        return frame.tail(large.ledger.wait(record) if self._checksums else 0)

    def _put(self, offset: int, source: Literal | Data | Made) -> None:
        self._extents.append(Extent(offset - self._start, source.length, source))

    # -- small items ---------------------------------------------------------------------------

    def _add_small(self, small: _SmallItem) -> None:
        self._small.append(small)
        self._small_nbytes += small.placed.length
        if self._small_nbytes >= PACKED_BYTES:
            self._end_small()

    def _end_small(self) -> None:
        """Put the small items since the last large one into one extent."""
        if self._small_nbytes:
            made = Made(self._small_nbytes, functools.partial(self._joined, self._small))
            self._put(self._small[0].placed.offset, made)
        self._small, self._small_nbytes = [], 0

    def _joined(self, items: list[_SmallItem]) -> bytes:
        """Return the bytes of small items; their checksums are known then."""
        parts: list[bytes] = []
        for placed, frame, source, nbytes, _ in items:
            data = source if isinstance(source, bytes) else bytes_at(source, nbytes)
            placed.crc = crc32(data) if self._checksums else 0
            parts += (frame.head, data, frame.tail(placed.crc))
        return b"".join(parts)


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
