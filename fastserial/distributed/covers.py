"""Which ranks hold which part of a tensor, each element in one place of the list."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from fastserial.distributed.boxes import Box, boxes_of_range, run_of
from fastserial.distributed.pieces import Flat, Mesh, TensorSpec, boxes_on

__all__ = ["Cover", "Held", "Run", "cover_of"]


class Held(NamedTuple):
    """A box and the ranks that hold it, each the same bytes."""

    box: Box
    ranks: tuple[int, ...]


class Run(NamedTuple):
    """Consecutive elements [first, stop) and the ranks that have them one behind the other.

    Attributes:
        boxes: what they are.
    """

    first: int
    stop: int
    ranks: tuple[int, ...]
    boxes: tuple[Box, ...]


class Cover(NamedTuple):
    """A tensor as all ranks hold it.

    Attributes:
        held: disjoint boxes.
        runs: those of them that are consecutive elements, in their order.
    """

    held: tuple[Held, ...]
    runs: tuple[Run, ...]

    def cut(self, first: int, stop: int) -> Iterator[tuple[int, int, Run | None]]:
        """Cut the elements [first, stop) at the ends of runs; None: what is in no run."""
        index = max(bisect_right(self.runs, first, key=_first) - 1, 0)
        while first < stop:
            run = self.runs[index] if index < len(self.runs) else None
            if run is not None and run.stop <= first:
                index += 1
                continue
            if run is None:
                end = stop
            elif first < run.first:
                end, run = min(stop, run.first), None
            else:
                end = min(stop, run.stop)
            yield first, end, run
            first = end


def _first(run: Run) -> int:
    return run.first


@lru_cache(maxsize=65536)
def cover_of(spec: TensorSpec, size: int) -> Cover:
    """Return who holds what of a tensor in a group of `size` ranks.

    Raises:
        ValueError: nobody holds some of it.
    """
    if isinstance(spec.held, Flat):
        runs = _sweep(spec.held)
        runs = [
            run._replace(boxes=tuple(boxes_of_range(spec.shape, run.first, run.stop)))
            for run in runs
        ]
        held = [Held(box, run.ranks) for run in runs for box in run.boxes]
    elif isinstance(spec.held, Mesh):
        boxes: dict[Box, list[int]] = {}
        for rank in spec.held.members():
            for box in boxes_on(spec, rank):
                boxes.setdefault(box, []).append(rank)
        held = [Held(box, tuple(ranks)) for box, ranks in boxes.items()]
        found = ((run_of(spec.shape, box), ranks, box) for box, ranks in held)
        runs = sorted(Run(*run, ranks, (box,)) for run, ranks, box in found if run is not None)
    else:
        everyone = tuple(range(size))
        held = [Held(box, everyone) for box in boxes_on(spec, 0)]
        runs = [Run(0, spec.numel, everyone, (box,)) for box, _ in held]
    if sum(box.numel for box, _ in held) != spec.numel:
        raise ValueError("the shards of all ranks do not make the whole tensor")
    return Cover(tuple(held), tuple(runs))


def _sweep(flat: Flat) -> list[Run]:
    """Return disjoint ranges with all ranks that hold them."""
    ends = sorted({end for _, first, stop in flat.ranges for end in (first, stop)})
    found = []
    for first, stop in pairwise(ends):
        ranks = {rank for rank, begin, end in flat.ranges if begin <= first and stop <= end}
        if ranks:
            found.append(Run(first, stop, tuple(sorted(ranks)), ()))
    return found
