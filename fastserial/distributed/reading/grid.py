"""Tensors of a file as row-major arrays, so that a range of bytes is a few boxes.

The array has the tensor's dimensions, ordered by their strides: a transposed tensor is an array,
too. A tensor with gaps, or with several indices of one element, is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from fastserial.distributed.sharding.boxes import Box, boxes_of_range, intersect
from fastserial.distributed.sharding.file_index import FileTensor
from fastserial.formats.storages import contiguous_stride

__all__ = ["Grid", "grid_of"]


@dataclass(slots=True, eq=False)
class Grid:
    """A tensor as a row-major array of the file.

    Attributes:
        tensor: which.
        order: the tensor's dimension for each of the array's, the outermost first.
        shape, steps: of the array; its strides (elements).
    """

    tensor: FileTensor
    order: tuple[int, ...]
    shape: tuple[int, ...]
    steps: tuple[int, ...]

    def box_of(self, box: Box) -> Box:
        """Return the array's box for a box of the tensor that is not empty."""
        return Box(
            tuple([box.offsets[dim] for dim in self.order]),
            tuple([box.sizes[dim] for dim in self.order]),
        )

    def part_of(self, view: torch.Tensor, whole: Box, box: Box) -> torch.Tensor:
        """Return the part of a target that a box of the array fills, in the array's dimensions.

        Args:
            view: what a rank holds of the tensor.
            whole: the box of the array that it is.
            box: a part of that.
        """
        view = view.permute(self.order)
        return view if box == whole else view[box.slices(whole)]

    def position(self, index: Sequence[int]) -> int:
        """Return where in the file an element of the array lies (bytes)."""
        number = sum(at * step for at, step in zip(index, self.steps, strict=True))
        return self.tensor.offset + number * self.tensor.itemsize

    def span(self, box: Box) -> tuple[int, int]:
        """Return where in the file a box begins and ends (bytes)."""
        first = last = 0
        for offset, size, step in zip(box.offsets, box.sizes, self.steps, strict=True):
            first += offset * step
            last += (offset + size - 1) * step
        item, base = self.tensor.itemsize, self.tensor.offset
        return base + first * item, base + (last + 1) * item

    def between(self, box: Box, first: int, stop: int) -> Iterator[Box]:
        """Yield the parts of a box whose elements begin in the bytes [first, stop) of the file."""
        item, base = self.tensor.itemsize, self.tensor.offset
        begin, end = self.span(box)
        if first <= begin and end <= stop:
            yield box
            return
        low = max(0, -((base - first) // item))
        high = min(prod(self.shape), -((base - stop) // item))
        for row in boxes_of_range(self.shape, low, high):
            part = intersect(row, box)
            if part is not None:
                yield part

    def runs(self, box: Box, near: int) -> Iterator[tuple[int, int]]:
        """Yield the bytes [first, stop) of the file that a box needs, in order.

        Gaps of up to `near` bytes are not told.
        """
        item = self.tensor.itemsize
        length, cut = item, len(self.shape)
        while cut:
            dim = cut - 1
            step = self.steps[dim] * item
            if box.sizes[dim] > 1 and step - length > near:
                break
            length += (box.sizes[dim] - 1) * step
            cut = dim
        yield from self._runs(box, cut, self.position(box.offsets), length)

    def _runs(self, box: Box, cut: int, first: int, length: int) -> Iterator[tuple[int, int]]:
        at = [0] * cut
        while True:
            offset = sum(i * step for i, step in zip(at, self.steps, strict=False))
            begin = first + offset * self.tensor.itemsize
            yield begin, begin + length
            dim = cut - 1
            while dim >= 0 and at[dim] == box.sizes[dim] - 1:
                at[dim] = 0
                dim -= 1
            if dim < 0:
                return
            at[dim] += 1


def grid_of(tensor: FileTensor) -> Grid | None:
    """Return the grid of a tensor that has elements; None if it is no row-major array."""
    dims = range(len(tensor.shape))
    order = tuple(sorted(dims, key=lambda dim: -tensor.stride[dim] * (tensor.shape[dim] > 1)))
    shape = tuple([tensor.shape[dim] for dim in order])
    steps = contiguous_stride(shape)
    for dim, size, step in zip(order, shape, steps, strict=True):
        if size > 1 and tensor.stride[dim] != step:
            return None
    return Grid(tensor, order, shape, steps)
