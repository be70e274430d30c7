"""Boxes: axis-aligned pieces of a tensor. Pure arithmetic.

A flat range of a row-major tensor, which is what a file holds, is a few boxes in a row; so is what
a rank holds of a sharded tensor. Where both meet, bytes have to move.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

from fastserial.formats.stored import Box as Box


def intersect(a: Box, b: Box) -> Box | None:
    """Return what two boxes of one tensor share, None if that is nothing."""
    offsets = tuple(map(max, a.offsets, b.offsets))
    ends = zip(a.offsets, a.sizes, b.offsets, b.sizes, offsets, strict=True)
    sizes = tuple([min(x + m, y + n) - offset for x, m, y, n, offset in ends])
    return Box(offsets, sizes) if min(sizes, default=1) > 0 else None


def boxes_of_range(shape: Sequence[int], first: int, stop: int) -> list[Box]:
    """Return the elements [first, stop) of a row-major tensor as boxes in their order.

    There are at most `2 * len(shape) - 1`; none for an empty range.
    """
    if first >= stop:
        return []
    if not shape:
        return [Box((), ())]
    found: list[Box] = []
    _cut(tuple(shape), first, stop, (), found)
    return found


def _cut(
    shape: tuple[int, ...], first: int, stop: int, before: tuple[int, ...], found: list[Box]
) -> None:
    """Add the boxes of a range of the tensor that is left once the indices `before` are fixed."""
    rest = shape[1:]
    row = prod(rest)
    ones, zeros = (1,) * len(before), (0,) * len(rest)
    top, bottom = first // row, (stop - 1) // row
    begins, ends = first - top * row, stop - bottom * row
    if top == bottom and (begins or ends != row):
        _cut(rest, begins, ends, (*before, top), found)
        return
    if begins:
        _cut(rest, begins, row, (*before, top), found)
        top += 1
    whole = bottom - top + (ends == row)
    if whole:
        found.append(Box((*before, top, *zeros), (*ones, whole, *rest)))
    if ends != row:
        _cut(rest, 0, ends, (*before, bottom), found)


def run_of(shape: Sequence[int], box: Box) -> tuple[int, int] | None:
    """Return the range [first, stop) of elements that a box is, None if it is no single one."""
    whole = True  # so far, from the last dimension on
    first, step = 0, 1
    for size, offset, length in zip(
        reversed(shape), reversed(box.offsets), reversed(box.sizes), strict=True
    ):
        if not whole and length != 1:
            return None
        whole = whole and length == size
        first += offset * step
        step *= size
    return first, first + box.numel


def span_of(shape: Sequence[int], box: Box) -> tuple[int, int]:
    """Return the range [first, stop) of elements from the first of a box to its last."""
    first, last, step = 0, 0, 1
    for size, offset, length in zip(
        reversed(shape), reversed(box.offsets), reversed(box.sizes), strict=True
    ):
        first += offset * step
        last += (offset + length - 1) * step
        step *= size
    return first, last + 1


def within(shape: Sequence[int], box: Box, first: int, stop: int) -> Iterator[Box]:
    """Yield the parts of a box that are in the elements [first, stop) of a row-major tensor."""
    begin, end = span_of(shape, box)
    if first <= begin and end <= stop:
        yield box
    elif first < end and begin < stop:
        for row in boxes_of_range(shape, first, stop):
            part = intersect(row, box)
            if part is not None:
                yield part


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges [first, stop) in their order, those that touch as one, without empty ones."""
    found: list[tuple[int, int]] = []
    for first, stop in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        elif first < stop:
            found.append((first, stop))
    return found


def runs_of(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return numbers as first ones and ends of consecutive ones."""
    return joined((number, number + 1) for number in numbers)
