"""Tensors of which nobody holds the bytes: they are fetched while the tensors are written."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fastserial.distributed.dcp.tensor_bytes import outermost_first
from fastserial.distributed.ranks.exchange import MemorySlice
from fastserial.distributed.sharding.boxes import Box, boxes_of_range, intersect, run_of
from fastserial.errors import CorruptCheckpointError
from fastserial.formats.storages import contiguous_stride
from fastserial.interrupts import finish
from fastserial.memory.storages import Memory
from fastserial.memory.untouched import Untouched

__all__ = ["AssembledTensors", "ChunkedMemory", "StoredChunk"]


class StoredChunk(NamedTuple):
    """A part of a tensor in a file.

    Attributes:
        memory: its bytes.
        box: which part; a last dimension counts the bytes of an element.
        strides: in which order its elements lie there, None: in their own.
    """

    memory: Memory
    box: Box
    strides: tuple[int, ...] | None = None


class ChunkedMemory:
    """A tensor's bytes in the order of its elements."""

    def __init__(self, shape: tuple[int, ...], parts: Sequence[StoredChunk]) -> None:
        """Keep where the parts are.

        Args:
            shape: of the tensor; a last dimension counts the bytes of an element.
        """
        self.nbytes = int(torch.Size(shape).numel())
        self._shape = shape
        self._parts = parts

    def copy_to(self, address: int, start: int, length: int) -> None:
        """Read bytes [start, start + length) into host memory at `address`.

        Raises:
            CorruptCheckpointError: no part has some of them.
        """
        if not length:
            return
        memory = (ctypes.c_uint8 * length).from_address(address)
        out = torch.frombuffer(memory, dtype=torch.uint8)
        at = found = 0
        for row in boxes_of_range(self._shape, start, start + length):
            view = out[at : at + row.numel].view(row.sizes)
            for filed in self._parts:
                part = intersect(row, filed.box)
                if part is not None:
                    _read(filed, part, view[part.slices(row)])
                    found += part.numel
            at += row.numel
        if found != length:
            raise CorruptCheckpointError("the parts of a tensor do not make it up")


def _read(filed: StoredChunk, part: Box, target: torch.Tensor) -> None:
    """Read a part of what is filed into a tensor of bytes."""
    offsets = [first - base for first, base in zip(part.offsets, filed.box.offsets, strict=True)]
    sizes = list(part.sizes)
    shape = list(filed.box.sizes)
    if filed.strides is not None:
        order = [*outermost_first(filed.strides), len(shape) - 1]
        offsets, sizes = [offsets[dim] for dim in order], [sizes[dim] for dim in order]
        shape = [shape[dim] for dim in order]
        target = target.permute(order)
    _read_box(filed, shape, Box(tuple(offsets), tuple(sizes)), target)


def _read_box(filed: StoredChunk, shape: list[int], box: Box, target: torch.Tensor) -> None:
    run = run_of(shape, box)
    if run is None:
        dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
        for index in range(box.sizes[dim]):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim] += index
            sizes[dim] = 1
            one = Box(tuple(offsets), tuple(sizes))
            _read_box(filed, shape, one, target.narrow(dim, index, 1))
        return
    first, stop = run
    if target.is_contiguous():
        filed.memory.copy_to(target.data_ptr(), first, stop - first)
        return
    scratch = torch.empty(box.sizes, dtype=torch.uint8, device="cpu")
    filed.memory.copy_to(scratch.data_ptr(), first, stop - first)
    target.copy_(scratch)


_ADDRESSES = 1 << 30  # bytes that are reserved at once
_ALIGN = 64


class AssembledTensors:
    """Makes such tensors, and knows where their bytes come from."""

    def __init__(self) -> None:
        self._regions: list[Untouched] = []
        self._left = 0
        self._sources: dict[int, Memory] = {}  # by the address of the storage
        self._rows: dict[int, Memory] = {}

    def tensor(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        rows: Memory,
        strides: tuple[int, ...] | None = None,
        memory: Memory | None = None,
    ) -> torch.Tensor:
        """Return a tensor alone in its storage, whose bytes must not be read.

        Args:
            rows: its bytes in the order of its elements.
            strides: of a tensor whose elements lie in another order (elements).
            memory: its bytes in that order.

        Raises:
            OSError: there are not as many addresses.
        """
        storage = self._storage(rows.nbytes)
        if rows.nbytes:
            self._sources[storage.data_ptr()] = memory or rows
            self._rows[storage.data_ptr()] = rows
        made = torch.empty(0, dtype=dtype, device="cpu")
        return made.set_(storage, 0, shape, strides or contiguous_stride(shape))

    def _storage(self, nbytes: int) -> torch.UntypedStorage:
        taken = nbytes + -nbytes % _ALIGN
        if taken > self._left or not self._regions:
            self._left = max(taken, _ADDRESSES)
            self._regions.append(Untouched(self._left, 1))
        self._left -= taken
        return self._regions[-1].storage(nbytes)

    def part_of(self, storage: torch.UntypedStorage, start: int, nbytes: int) -> Memory | None:
        """Return where bytes of a storage come from, None if it is none of these."""
        found = self._sources.get(storage.data_ptr())
        if found is None or (start == 0 and nbytes == found.nbytes):
            return found
        return MemorySlice(found, start, nbytes)

    def close(self) -> None:
        """Give the addresses back; no tensor may be used any more. Idempotent."""
        regions, self._regions = self._regions, []
        finish(*(region.close for region in regions))

    def in_order(self, tensor: torch.Tensor) -> Memory | None:
        """Return where the bytes of a tensor come from, in the order of its elements."""
        return self._rows.get(tensor.untyped_storage().data_ptr())
