"""Where the items of a rank's file lie, and what writes them: small ones in runs, large ones alone.

Each tensor is an archive of `torch.save`.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from fastserial.checksums import CrcLedger, crc32
from fastserial.config.performance import PACKED_BYTES, PACKED_STORAGE
from fastserial.distributed.dcp.item_layout import NO_CONTAINER, Frame, frame_of
from fastserial.distributed.dcp.metadata_file import WriteResults, place_of
from fastserial.distributed.dcp.tensor_bytes import TensorBytes, bytes_of
from fastserial.errors import LayoutError
from fastserial.formats.dcp import Known
from fastserial.formats.extents import Data, Extent, Literal, Made
from fastserial.formats.zip.layout import lookalike_of
from fastserial.memory.storages import bytes_at, host_bytes
from fastserial.patching.self_check import self_check
from fastserial.saving import torch_writer

__all__ = ["Batch", "ShardLayout"]

_HEAD = 8  # bytes of a tensor that torch may take for a data descriptor


class Batch(NamedTuple):
    """What was laid out and is to be written next: `nbytes` in extents from byte 0 on."""

    extents: list[Extent]
    nbytes: int
    ledger: CrcLedger
    storages: list[torch.UntypedStorage]


class _Small(NamedTuple):
    """An item that is written together with its neighbours.

    Attributes:
        number: of the item in the file.
        frame: what surrounds it.
        data: its bytes, or where they lie on the host; `nbytes` of them.
        owner: what keeps that memory alive.
    """

    number: int
    frame: Frame
    data: bytes | int
    nbytes: int
    owner: object


class _Entry(NamedTuple):
    """An item that was laid out (bytes); `start` and `strides` as in `Known`.

    `described`: `.metadata` says what is in it, so that its checksum can be told.
    """

    item: WriteItem
    offset: int
    length: int
    start: int | None
    strides: tuple[int, ...] | None
    described: bool


class _Pending:
    """The checksums of large tensors that are being written."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.indices: list[int] = []
        self.ledger = CrcLedger((), ())

    def start(self) -> CrcLedger:
        self.ledger = CrcLedger(self.sizes, [None] * len(self.sizes))
        return self.ledger


class ShardLayout:
    """Lays items out one after the other. `take` gives what is to be written next."""

    def __init__(
        self,
        name: str,
        bytes_of: Callable[[torch.Tensor], TensorBytes | None] = bytes_of,
    ) -> None:
        """Begin an empty file.

        Args:
            name: of the file, as `.metadata` gives it.
            bytes_of: says where the bytes of tensors are.
        """
        self._bytes_of = bytes_of
        self._name = name
        self._checksums = torch_writer.checksums_wanted()
        self._alignment = torch_writer.alignment()
        self._frames_known = _is_layout_known()
        self._end = 0
        self._entries: list[_Entry] = []
        self._crcs: dict[int, int] = {}
        self._all_pending: list[_Pending] = []
        self._begin()

    def _begin(self) -> None:
        """Begin the next batch."""
        self._start = self._end
        self._extents: list[Extent] = []
        self._storages: list[torch.UntypedStorage] = []
        self._run: list[_Small] = []
        self._run_nbytes = 0
        self._pending = _Pending()

    def add(self, item: WriteItem, data: torch.Tensor | io.BytesIO, planned: bool = True) -> None:
        """Append an item; its memory must stay as it is until the batch is written.

        Args:
            planned: what the item says of a tensor is what `.metadata` says of it.

        Raises:
            LayoutError: a sparse tensor, of which stock's reader would leave zeros.
        """
        if not isinstance(data, torch.Tensor):
            self._add_known(item, bytes(data.getbuffer()), 0)
            return
        tensor = data.detach()
        if tensor.layout is not torch.strided:
            raise LayoutError(
                f"{item.index.fqn}: its layout is {tensor.layout}, which stock cannot load: "
                "save it dense"
            )
        found = self._bytes_of(tensor) if self._frames_known else None
        planned = planned and _is_as_planned(item, tensor)
        if found is None:
            self._add_known(item, _saved_by_torch(tensor), None)
            return
        try:
            frame = frame_of(
                tensor.dtype, tensor.shape, found.strides, self._alignment, self._checksums
            )
        except LayoutError:
            self._add_known(item, _saved_by_torch(tensor), None)
            return
        self._add_tensor(item, tensor, found, frame, planned)

    def take(self) -> Batch:
        """Return what was laid out since the last call."""
        self._end_run()
        ledger = self._pending.start()
        batch = Batch(self._extents, self._end - self._start, ledger, self._storages)
        self._all_pending.append(self._pending)
        self._begin()
        return batch

    def results(self) -> WriteResults:
        """Return where the items are, once all of them are written."""
        for pending in self._all_pending if self._checksums else ():
            for record, index in enumerate(pending.indices):
                self._crcs[index] = pending.ledger.wait(record)
        found = WriteResults()
        for index, (item, offset, length, start, strides, described) in enumerate(self._entries):
            crc = self._crcs[index] if self._checksums and described else None
            place = place_of(self._name, offset, length, tuple(Known(start, crc, strides)))
            found.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=place))
        return found

    # -- one item ------------------------------------------------------------------------------

    def _enter(
        self,
        item: WriteItem,
        length: int,
        start: int | None,
        strides: tuple[int, ...] | None = None,
        described: bool = True,
    ) -> int:
        """Give an item its place; return its index."""
        self._entries.append(_Entry(item, self._end, length, start, strides, described))
        self._end += length
        return len(self._entries) - 1

    def _add_known(self, item: WriteItem, data: bytes, start: int | None) -> None:
        """Append bytes."""
        length = len(data)
        index = self._enter(item, length, start)
        if length <= PACKED_STORAGE:
            self._join(_Small(index, NO_CONTAINER, data, length, None), length)
            return
        self._end_run()
        self._crcs[index] = crc32(data) if self._checksums else 0
        self._put(self._end - length, Literal(data))

    def _add_tensor(
        self,
        item: WriteItem,
        tensor: torch.Tensor,
        found: TensorBytes,
        frame: Frame,
        described: bool,
    ) -> None:
        nbytes = found.nbytes
        length = len(frame.head) + nbytes + frame.tail_nbytes
        strides = None if tensor.is_contiguous() else found.strides
        start = len(frame.head) if described else None  # None: whoever reads it has to look
        index = self._enter(item, length, start, strides, described)
        if nbytes == 0 or (found.address and nbytes <= PACKED_STORAGE):
            self._join(_Small(index, frame, found.address, nbytes, tensor), length)
            return
        self._end_run()
        self._storages.append(tensor.untyped_storage())
        pending = self._pending
        record = len(pending.sizes)
        pending.sizes.append(nbytes)
        pending.indices.append(index)
        offset = self._end - length
        self._put(offset, Literal(frame.head))
        data = Data(found.memory, nbytes, record if self._checksums else None)
        self._put(offset + len(frame.head), data)
        if frame.tail_nbytes:
            head = host_bytes(found.memory, _HEAD) if nbytes >= _HEAD else b""
            tail = functools.partial(self._tail, frame, pending, record, lookalike_of(head))
            self._put(self._end - frame.tail_nbytes, Made(frame.tail_nbytes, tail))

    def _tail(self, frame: Frame, pending: _Pending, record: int, lookalike: int | None) -> bytes:
        crc = pending.ledger.wait(record) if self._checksums else 0
        return frame.tail(crc, lookalike)

    def _put(self, offset: int, source: Literal | Data | Made) -> None:
        if source.length:
            self._extents.append(Extent(offset - self._start, source.length, source))

    # -- runs of small ones --------------------------------------------------------------------

    def _join(self, small: _Small, length: int) -> None:
        """Add what was given a place last to the run."""
        if not small.nbytes:
            self._crcs[small.number] = 0
        self._run.append(small)
        self._run_nbytes += length
        if self._run_nbytes >= PACKED_BYTES:
            self._end_run()

    def _end_run(self) -> None:
        run, nbytes = self._run, self._run_nbytes
        if nbytes:
            made = Made(nbytes, functools.partial(self._joined, run))
            last = self._extents[-1] if self._extents else None
            offset = last.offset + last.length if last is not None else 0
            self._extents.append(Extent(offset, nbytes, made))
        self._run, self._run_nbytes = [], 0

    def _joined(self, run: list[_Small]) -> bytes:
        """Return the bytes of a run; its checksums are known then."""
        parts: list[bytes] = []
        for number, frame, source, nbytes, _ in run:
            data = source if isinstance(source, bytes) else bytes_at(source, nbytes)
            crc = crc32(data) if self._checksums else 0
            self._crcs[number] = crc
            parts += (frame.head, data, frame.tail(crc, lookalike_of(data[:_HEAD])))
        return b"".join(parts)


def _is_as_planned(item: WriteItem, tensor: torch.Tensor) -> bool:
    """Return whether `.metadata` tells the dtype and shape of what is saved."""
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
def _is_layout_known() -> bool:
    """Return whether our zip layout is the one of this torch."""
    return self_check() is None
