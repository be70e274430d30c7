"""Which ranks hold which part of a tensor, as disjoint boxes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from fastserial.distributed.sharding.boxes import Box, boxes_of_range, run_of, span_of
from fastserial.distributed.sharding.pieces import Flat, Mesh, boxes_at

__all__ = ["Cover", "HeldBox", "HeldRange", "cover_of"]


class HeldBox(NamedTuple):
    """A box and the ranks that hold it, each the same bytes.

    Attributes:
        first, stop: the row-major elements from its first to its last.
    """

    box: Box
    ranks: tuple[int, ...]
    first: int
    stop: int


class HeldRange(NamedTuple):
    """Consecutive elements [first, stop) and some ranks."""

    first: int
    stop: int
    ranks: tuple[int, ...]


class Cover(NamedTuple):
    """A tensor as all ranks hold it.

    Attributes:
        held: disjoint boxes.
        runs: those of them that are consecutive elements, in their order, with the ranks that have
            all of it consecutively.
        parts: if there are none: elements of which each of the ranks has a part, and nobody else.
    """

    held: tuple[HeldBox, ...]
    runs: tuple[HeldRange, ...]
    parts: tuple[HeldRange, ...]


@lru_cache(maxsize=8192)
def cover_of(shape: tuple[int, ...], holders: Mesh | Flat | None, size: int) -> Cover:
    """Return which ranks hold what of a tensor in a group of `size` ranks (`TensorSpec.held`).

    Raises:
        ValueError: nobody holds some of it.
    """
    whole = Box((0,) * len(shape), shape)
    if isinstance(holders, Flat):
        runs = _sweep(holders)
        held = [
            _held(shape, box, run.ranks)
            for run in runs
            for box in boxes_of_range(shape, run.first, run.stop)
        ]
    else:
        boxes: dict[Box, list[int]] = {}
        if isinstance(holders, Mesh):
            mesh, placed = holders._replace(grids=()), set()
            for grid in holders.grids:
                for index, rank in enumerate(grid):
                    if rank >= 0 and rank not in placed:
                        placed.add(rank)
                        for box in boxes_at(shape, mesh, index):
                            boxes.setdefault(box, []).append(rank)
        elif whole.numel:
            boxes[whole] = list(range(size))
        held = [_held(shape, box, tuple(sorted(ranks))) for box, ranks in boxes.items()]
        runs = sorted(
            HeldRange(one.first, one.stop, one.ranks)
            for one in held
            if run_of(shape, one.box) is not None
        )
    if sum(one.box.numel for one in held) != whole.numel:
        raise ValueError("the shards of all ranks do not make the whole tensor")
    return Cover(tuple(held), tuple(runs), () if runs else tuple(_parts(held)))


def _held(shape: Sequence[int], box: Box, ranks: tuple[int, ...]) -> HeldBox:
    return HeldBox(box, ranks, *span_of(shape, box))


def _sweep(flat: Flat) -> list[HeldRange]:
    """Return disjoint ranges with all ranks that hold them."""
    ends: dict[int, list[int]] = {}
    for index, (_, first, stop) in enumerate(flat.ranges):
        ends.setdefault(first, []).append(index)
        ends.setdefault(stop, []).append(index)
    found = []
    inside: set[int] = set()
    for first, stop in pairwise(sorted(ends)):
        inside.symmetric_difference_update(ends[first])
        if inside:
            ranks = {flat.ranges[index][0] for index in inside}
            found.append(HeldRange(first, stop, tuple(sorted(ranks))))
    return found


def _parts(held: Sequence[HeldBox]) -> list[HeldRange]:
    """Return what boxes hold that lie in each other's gaps, such as shards of columns."""
    found: list[tuple[int, int, set[int]]] = []
    for one in sorted(held, key=lambda one: one.first):
        if found and one.first < found[-1][1]:
            first, stop, ranks = found[-1]
            ranks.update(one.ranks)
            found[-1] = first, max(stop, one.stop), ranks
        else:
            found.append((one.first, one.stop, set(one.ranks)))
    return [HeldRange(first, stop, tuple(sorted(ranks))) for first, stop, ranks in found]
