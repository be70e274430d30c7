"""Tensors of a file as row-major arrays, so that a range of bytes is a few boxes.

The array has the tensor's dimensions, ordered by their strides: a transposed tensor is an array,
too. A tensor with gaps, or with several indices of one element, is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from fastserial.distributed.sharding.boxes import Box, span_of
from fastserial.distributed.sharding.file_index import FileTensor
from fastserial.formats.tensors import contiguous_stride


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

    def bytes_of(self, first: int, stop: int) -> tuple[int, int]:
        """Return where in the file elements [first, stop) begin and end (bytes)."""
        item, base = self.tensor.itemsize, self.tensor.offset
        return base + first * item, base + stop * item

    def runs(self, box: Box, near: int) -> Iterator[tuple[int, int]]:
        """Yield the elements [first, stop) of the array that a box needs, in order.

        Gaps of up to `near` bytes are included.
        """
        length, cut = 1, len(self.shape)
        while cut:
            dim = cut - 1
            step = self.steps[dim]
            if box.sizes[dim] > 1 and (step - length) * self.tensor.itemsize > near:
                break
            length += (box.sizes[dim] - 1) * step
            cut = dim
        first, _ = span_of(self.shape, box)
        for index in product(*map(range, box.sizes[:cut])):
            begin = first + sum(at * step for at, step in zip(index, self.steps, strict=False))
            yield begin, begin + length


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
