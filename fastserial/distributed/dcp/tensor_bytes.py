"""The bytes that stock saves of a tensor: those of its storage, or of a dense copy."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fastserial.checkpoints.tensor_read import is_dense
from fastserial.distributed.ranks.exchange import GatheredMemory
from fastserial.memory.storages import HostMemory, Memory, memmove

__all__ = ["TensorBytes", "bytes_of", "outermost_first"]


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
    memory = _GatheredMemory(tensor.permute(outermost_first(strides)), nbytes)
    return TensorBytes(memory, nbytes, strides, 0)


def outermost_first(strides: Sequence[int]) -> list[int]:
    """Return the dimensions of a dense tensor in memory order."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


class _GatheredMemory:
    """Memory on a device, or with strides, of which any range of bytes may be copied."""

    def __init__(self, view: torch.Tensor, nbytes: int) -> None:
        self.nbytes = nbytes
        self._item = view.itemsize
        self._elements = GatheredMemory(view, 0, nbytes)

    def copy_to(self, address: int, start: int, length: int) -> None:
        """Copy bytes [start, start + length) to host memory at `address`."""
        item = self._item
        stop = start + length
        first, last = start + -start % item, stop - stop % item
        if first > last:  # within an element
            self._copy_part(address, start, length)
            return
        self._copy_part(address, start, first - start)
        if first < last:
            self._elements.copy_to(address + first - start, first, last - first)
        self._copy_part(address + last - start, last, stop - last)

    def _copy_part(self, address: int, start: int, length: int) -> None:
        """Copy a part of one element."""
        if length:
            element = ctypes.create_string_buffer(self._item)
            skipped = start % self._item
            self._elements.copy_to(ctypes.addressof(element), start - skipped, self._item)
            memmove(address, ctypes.addressof(element) + skipped, length)
