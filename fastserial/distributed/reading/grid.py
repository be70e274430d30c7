"""Tensors of a file as boxes of row-major arrays, so that a range of bytes is a few boxes.

A tensor's dimensions, ordered by their strides, are those of an array that lies in the file
without gaps, of which the tensor may be a part: a transposed tensor is an array of its own, a
slice is a box of a larger one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch

from fastserial.distributed.sharding.boxes import Box, boxes_of_range, intersect
from fastserial.distributed.sharding.file_index import FileTensor

__all__ = ["Grid", "grid_of"]


@dataclass(slots=True, eq=False)
class Grid:
    """A tensor's place in a row-major array of the file. The array may be less than a tensor.

    Attributes:
        tensor: what it is about.
        shape: of the array; behind those of the tensor it may have a dimension of its own.
        steps: its strides, in elements.
        order: the tensor's dimension for each of the array's, without its own.
        rest: the tensor's other dimensions: along them the file holds one element.
    """

    tensor: FileTensor
    shape: tuple[int, ...]
    steps: tuple[int, ...]
    order: tuple[int, ...]
    rest: tuple[int, ...]

    @property
    def _more(self) -> int:
        return len(self.shape) - len(self.order)

    def box_of(self, box: Box) -> Box:
        """Return the array's box for a box of the tensor that is not empty."""
        offsets = (*(box.offsets[dim] for dim in self.order), *(0,) * self._more)
        return Box(offsets, (*(box.sizes[dim] for dim in self.order), *(1,) * self._more))

    def part_of(self, view: torch.Tensor, whole: Box, box: Box) -> torch.Tensor:
        """Return the part of a target that a box of the array fills.

        Args:
            view: what a rank holds of the tensor.
            whole: the box of the array that it is.
            box: a part of that.

        Returns:
            Its dimensions are the array's and then `rest`.
        """
        for place, dim in enumerate(self.order if box != whole else ()):
            at = box.offsets[place] - whole.offsets[place]
            view = view.narrow(dim, at, box.sizes[place])
        view = view.permute((*self.order, *self.rest))
        return view.unsqueeze(len(self.order)) if self._more else view

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
    """Return the grid of a tensor that has elements; None if it is no part of an array.

    That is so if different indices reach the same element other than by a stride of 0.
    """
    dims = range(len(tensor.shape))
    order = tuple(
        sorted(
            (dim for dim in dims if tensor.shape[dim] > 1 and tensor.stride[dim] > 0),
            key=lambda dim: -tensor.stride[dim],
        )
    )
    rest = tuple(dim for dim in dims if dim not in order)
    steps = [tensor.stride[dim] for dim in order]
    shape: list[int] = [tensor.shape[order[0]]] if order else []
    for place, dim in enumerate(order[1:], 1):
        size, over = divmod(steps[place - 1], steps[place])
        if over or size < tensor.shape[dim]:
            return None
        shape.append(size)
    if steps and steps[-1] > 1:
        shape.append(steps[-1])
        steps.append(1)
    return Grid(tensor, tuple(shape), tuple(steps), order, rest)
