"""This rank's memory of a source, by the place of its bytes in the whole."""

from __future__ import annotations

import ctypes
from bisect import bisect_right

import torch

from fastserial.distributed.ranks.exchange import as_integers, is_as_it_lies
from fastserial.distributed.sharding.boxes import Box, boxes_of_range, run_of
from fastserial.distributed.sharding.flat_shard import FlatShard
from fastserial.distributed.sharding.pieces import local_of
from fastserial.distributed.state.tables import Source
from fastserial.memory.storages import HostMemory, Memory
from fastserial.overlap.snapshot import Part

__all__ = ["Gathered", "Memories"]


class Memories:
    """What a rank has of one source, as memory that begins at the whole's first byte.

    So a place in the whole is a place in the memory; only what the rank has may be read.
    """

    def __init__(self, source: Source) -> None:
        spec = source.spec
        self._item = spec.dtype.itemsize
        self._nbytes = spec.nbytes
        found = []
        if isinstance(source.leaf, FlatShard):
            found.append((source.leaf.start, local_of(source.leaf, source.key)))
        else:
            for box, view in source.parts:
                run = run_of(spec.shape, box)
                if run is not None:
                    found.append((run[0], view))
        found.sort(key=lambda item: item[0])
        self._firsts = [first for first, _ in found]
        self._views = [view for _, view in found]

    def at(self, start: int) -> Memory:
        """Return the memory that has byte `start` of the whole."""
        view, base = self._view(start)
        if view.device.type == "cpu" and is_as_it_lies(view):
            return HostMemory(view.data_ptr() - base, self._nbytes, view)
        return Gathered(view, base, self._nbytes)

    def part(self, start: int, length: int) -> Part:
        """Return bytes [start, start + length) of the whole as what a snapshot takes."""
        view, base = self._view(start)
        if not is_as_it_lies(view):
            return Part(Gathered(view, base, self._nbytes), start, length)
        first = int(view.storage_offset()) * view.element_size() + start - base
        return Part(view.untyped_storage(), first, length)

    def _view(self, start: int) -> tuple[torch.Tensor, int]:
        """Return the view that has a byte of the whole, and its own first byte there."""
        index = bisect_right(self._firsts, start // self._item) - 1
        return self._views[index], self._firsts[index] * self._item


class Gathered:
    """A view on a device, or in strides, whose bytes are copied together as they are asked for."""

    def __init__(self, view: torch.Tensor, base: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._view = as_integers(view)
        self._base = base

    def copy_to(self, address: int, start: int, length: int) -> None:
        """Copy bytes [start, start + length) to host memory at `address`."""
        item = self._view.element_size()
        begin = (start - self._base) // item
        target = torch.frombuffer(
            (ctypes.c_uint8 * length).from_address(address), dtype=torch.uint8
        )
        shape = tuple(self._view.shape)
        whole = Box((0,) * len(shape), shape)
        at = 0
        for box in boxes_of_range(shape, begin, begin + length // item):
            end = at + box.numel * item
            piece = self._view[box.slices(whole)]
            if at % item == 0 and address % item == 0:
                target[at:end].view(piece.dtype).view(piece.shape).copy_(piece)
            else:
                target[at:end].copy_(piece.contiguous().flatten().view(torch.uint8))
            at = end
