"""Tensors of which nobody holds the bytes: they are fetched while the tensors are written."""

from __future__ import annotations

import torch

from fastserial.distributed.untouched import Untouched
from fastserial.formats.storages import contiguous_stride
from fastserial.interrupts import finish
from fastserial.memory.storages import Memory

__all__ = ["Assembled"]

_ADDRESSES = 1 << 30  # bytes that are reserved at once
_ALIGN = 64


class Assembled:
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
        return _Part(found, start, nbytes)

    def close(self) -> None:
        """Give the addresses back; no tensor may be used any more. Idempotent."""
        regions, self._regions = self._regions, []
        finish(*(region.close for region in regions))

    def in_order(self, tensor: torch.Tensor) -> Memory | None:
        """Return where the bytes of a tensor come from, in the order of its elements."""
        return self._rows.get(tensor.untyped_storage().data_ptr())


class _Part:
    """Some of a memory's bytes."""

    def __init__(self, whole: Memory, start: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._whole = whole
        self._start = start

    def copy_to(self, address: int, start: int, length: int) -> None:
        """Copy bytes [start, start + length) to host memory at `address`."""
        self._whole.copy_to(address, self._start + start, length)
