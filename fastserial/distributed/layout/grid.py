"""Chunks of tensors as row-major arrays, so that a range of bytes is a few boxes.

The array has the tensor's dimensions, ordered by their strides: a transposed tensor is an array,
too. A chunk with gaps, or with several indices of one element, is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product

import torch

from fastserial.distributed.layout.boxes import Box, intersect, span_of
from fastserial.distributed.layout.file_index import FileTensor
from fastserial.formats.stored import Chunk
from fastserial.formats.tensors import contiguous_stride


@dataclass(slots=True, eq=False)
class Grid:
    """A chunk of a tensor as a row-major array of the file.

    Attributes:
        tensor: of which it is.
        chunk: which of its elements it has, and where they are.
        is_whole: it has all of them.
        dtype: of the elements there.
        offset: where they begin: an address of `load.files`.
        order: the tensor's dimension for each of the array's, the outermost first.
        shape, steps: of the array; its strides (elements).
    """

    tensor: FileTensor
    chunk: Chunk
    is_whole: bool
    dtype: torch.dtype
    offset: int
    order: tuple[int, ...]
    shape: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return int(self.dtype.itemsize)

    def box_of(self, part: Box) -> Box:
        """Return the array's box for a box of the tensor of which the chunk has all elements."""
        starts = part.offsets
        if not self.is_whole:
            starts = tuple(
                [at - base for at, base in zip(starts, self.chunk.elements.offsets, strict=True)]
            )
        return Box(
            tuple([starts[dim] for dim in self.order]),
            tuple([part.sizes[dim] for dim in self.order]),
        )

    def boxes_of(self, boxes: Iterable[Box]) -> list[Box]:
        """Return the array's boxes for what the chunk has of boxes of the tensor."""
        if self.is_whole:
            return [self.box_of(box) for box in boxes]
        parts = (intersect(box, self.chunk.elements) for box in boxes)
        return [self.box_of(part) for part in parts if part is not None]

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
        item, base = self.itemsize, self.offset
        return base + first * item, base + stop * item

    def runs(self, box: Box, near: int) -> Iterator[tuple[int, int]]:
        """Yield the elements [first, stop) of the array that a box needs, in order.

        Gaps of up to `near` bytes are included.
        """
        length, cut = 1, len(self.shape)
        while cut:
            dim = cut - 1
            step = self.steps[dim]
            if box.sizes[dim] > 1 and (step - length) * self.itemsize > near:
                break
            length += (box.sizes[dim] - 1) * step
            cut = dim
        first, _ = span_of(self.shape, box)
        for index in product(*map(range, box.sizes[:cut])):
            begin = first + sum(at * step for at, step in zip(index, self.steps, strict=False))
            yield begin, begin + length


def grid_of(tensor: FileTensor, chunk: Chunk, dtype: torch.dtype, offset: int) -> Grid | None:
    """Return the grid of a chunk that has elements; None if it is no row-major array.

    Args:
        tensor, chunk, dtype, offset: see `Grid`.
    """
    sizes, strides = chunk.elements.sizes, chunk.stride
    order = tuple(sorted(range(len(sizes)), key=lambda dim: -strides[dim] * (sizes[dim] > 1)))
    shape = tuple([sizes[dim] for dim in order])
    steps = contiguous_stride(shape)
    for dim, size, step in zip(order, shape, steps, strict=True):
        if size > 1 and strides[dim] != step:
            return None
    is_whole = chunk.is_all_of(tensor.shape)
    return Grid(tensor, chunk, is_whole, dtype, offset, order, shape, steps)
