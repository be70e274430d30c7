"""Which rank holds an element of a tensor: arithmetic on the placements, no list of ranks.

Of replicas one is looked at, as a whole. What an answer costs grows with the answer, and with the
number of mesh dimensions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from fastserial.distributed.layout.boxes import Box, boxes_of_range, intersect, span_of
from fastserial.distributed.layout.placement import Flat, Mesh, boxes_at, split_order
from fastserial.formats.tensors import contiguous_stride

_KEPT, _PARTS_KEPT = 1024, 64  # answers that are kept of a tensor, and the most parts of one


_INCOMPLETE = "the shards of all ranks do not make the whole tensor"


class Share(NamedTuple):
    """A place among several: the `at`-th of `total` bytes."""

    at: int
    total: int

    def of(self, count: int) -> int:
        """Return which of `count` equal parts has the place."""
        return min(count * self.at // max(self.total, 1), count - 1)  # of nothing, the last


class Run(NamedTuple):
    """Where an index i lies in what one holder has along a dimension: [i - before, i + after).

    Attributes:
        mesh_index: what the holder's coordinates make of its index in the mesh.
    """

    mesh_index: int
    before: int
    after: int


class Axis(NamedTuple):
    """A mesh dimension that splits a tensor's dimension.

    Attributes:
        shards: how many it makes.
        factor: it splits each of that many equal parts of what there is (`_StridedShard`).
        step: of its coordinates in the row-major mesh.
    """

    shards: int
    factor: int
    step: int


class SplitDim:
    """A dimension of a tensor that mesh dimensions split, one after the other."""

    def __init__(self, size: int, axes: Sequence[Axis]) -> None:
        self.size = size
        self._axes = tuple(axes)
        self.parts = prod(axis.factor for axis in axes)  # at most so many runs of one holder
        self._only: tuple[int, int] | None = None  # of a single axis: size of a chunk, and its step
        if len(axes) == 1 and axes[0].factor == 1:
            self._only = max(1, -(-size // axes[0].shards)), axes[0].step

    def at(self, index: int) -> Run:
        """Return who holds an index, and how much around it."""
        if self._only is not None:  # most often; the same as below
            chunk, step = self._only
            at, offset = divmod(index, chunk)
            return Run(at * step, offset, min(chunk, self.size - at * chunk) - offset)
        total, found, before, after = self.size, 0, index, self.size - index
        for shards, factor, step in self._axes:
            if factor > 1:
                part = -(-total // factor)
                which, within = divmod(index, part)
                length = min(part, total - which * part)
                at, index = divmod(within, -(-length // shards))
                # What holder `at` has of all parts, one after the other, is what is split next.
                each = _of_chunk(part, shards, at)
                here = _of_chunk(length, shards, at)
                total = total // part * each + _of_chunk(total % part, shards, at)
                before, after = min(before, index), min(after, here - index)
                index += which * each
            else:
                at, index = divmod(index, -(-total // shards))
                total = _of_chunk(total, shards, at)
                before, after = min(before, index), min(after, total - index)
            found += at * step
        return Run(found, before, after)

    def runs(self, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the runs in [first, stop): first index, length, and `Run.mesh_index`."""
        while first < stop:
            run = self.at(first)
            length = min(run.after, stop - first)
            yield first, length, run.mesh_index
            first += length


def _of_chunk(total: int, count: int, at: int) -> int:
    """Return how many of `total` elements are in chunk `at` of `count`."""
    chunk = -(-total // count)
    return min(max(total - at * chunk, 0), chunk)


class Holders(ABC):
    """A tensor as one replica holds it.

    Attributes:
        spans: disjoint elements [first, stop) of which this rank holds some, in order.
        is_stored: of each span it holds all, as one piece of its memory.
    """

    spans: Sequence[tuple[int, int]] = ()
    is_stored = True

    @abstractmethod
    def holder_at(self, element: int) -> tuple[int, int]:
        """Return who holds an element, and the end of the elements from there that it holds."""

    @abstractmethod
    def parts(self, first: int, stop: int) -> Sequence[tuple[Box, int]]:
        """Return the boxes of elements [first, stop), in a fixed order, with their holders."""

    @abstractmethod
    def own_parts(self, first: int, stop: int) -> Sequence[Box]:
        """Return those of this rank, in the same order, and cut alike."""


class RangeHolders(Holders):
    """Ranges of elements, each of one rank.

    Attributes:
        cuts: within how many blocks of the file what one rank has may end, at most.
    """

    def __init__(
        self, shape: tuple[int, ...], ranges: Sequence[tuple[int, int, int]], rank: int
    ) -> None:
        """Take them.

        Args:
            ranges: first element, end, and rank: disjoint, in order, all of the tensor.
            rank: this rank.

        Raises:
            ValueError: nobody holds some of it.
        """
        if sum(stop - first for first, stop, _ in ranges) != prod(shape):
            raise ValueError(_INCOMPLETE)
        self._shape = shape
        self._firsts = [first for first, _, _ in ranges]
        self._ranges = ranges
        counts = Counter(owner for _, _, owner in ranges)
        self.cuts = max(counts.values()) if len(counts) > 1 else 0
        self._rank = rank
        self.spans = [(first, stop) for first, stop, owner in ranges if owner == rank]

    def holder_at(self, element: int) -> tuple[int, int]:
        _, stop, rank = self._ranges[bisect_right(self._firsts, element) - 1]
        return rank, stop

    def parts(self, first: int, stop: int) -> Sequence[tuple[Box, int]]:
        return [
            (box, rank)
            for low, high, rank in self._within(first, stop)
            for box in boxes_of_range(self._shape, low, high)
        ]

    def own_parts(self, first: int, stop: int) -> Sequence[Box]:
        return [
            box
            for low, high, owner in self._within(first, stop)
            if owner == self._rank
            for box in boxes_of_range(self._shape, low, high)
        ]

    def _within(self, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
        at = bisect_right(self._firsts, first) - 1
        while at < len(self._ranges) and self._firsts[at] < stop:
            low, high, rank = self._ranges[at]
            yield max(low, first), min(high, stop), rank
            at += 1


def holders_of_flat(shape: tuple[int, ...], flat: Flat, share: Share, rank: int) -> RangeHolders:
    """Return who holds the elements of a FlatShard; of several ranks, the one at `share`.

    If some ranks hold all of it, it is one of these: ranges are not compared.

    Raises:
        ValueError: nobody holds some of it.
    """
    every = prod(shape)
    alone = sorted({rank for rank, first, stop in flat.ranges if (first, stop) == (0, every)})
    if alone and every:
        return RangeHolders(shape, [(0, every, alone[share.of(len(alone))])], rank)
    ends: dict[int, list[int]] = {}
    for index, (_, first, stop) in enumerate(flat.ranges):
        if first == stop:
            continue
        ends.setdefault(first, []).append(index)
        ends.setdefault(stop, []).append(index)
    found: list[tuple[int, int, int]] = []
    inside: set[int] = set()
    for first, stop in pairwise(sorted(ends)):
        inside.symmetric_difference_update(ends[first])
        if inside:
            ranks = sorted({flat.ranges[index][0] for index in inside})
            found.append((first, stop, ranks[share.of(len(ranks))]))
    return RangeHolders(shape, found, rank)


class MeshRanks:
    """The ranks of a mesh: what does not depend on the tensor.

    Attributes:
        mesh: without its ranks.
        rank, index: this rank, and its index in the mesh, None if it is not in it.
        steps: what a coordinate adds to the row-major index, for each dimension of the mesh.
        replicas: of a tensor: the ranks of a mesh, and the index where the replica begins. If the
            group has all ranks of some, only these.
        missing: indices of shards of which the group has no replica.
    """

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.rank, self.index = rank, mesh.index_of(rank)
        if len(mesh.grids) > 1:
            mesh = mesh._replace(grids=_each_rank_once(mesh.grids))
        self.mesh = mesh._replace(grids=())
        self.steps = contiguous_stride(mesh.shape)
        dims = list(zip(mesh.shape, self.steps, mesh.splits, strict=True))
        copies = _sums([(size, step) for size, step, split in dims if split.dim is None])
        shards = _sums([(size, step) for size, step, split in dims if split.dim is not None])
        every = [(grid, base) for grid in mesh.grids for base in copies]
        whole = [(grid, base) for grid, base in every if all(grid[base + at] >= 0 for at in shards)]
        self.replicas = whole or every
        self.missing: list[int] = []
        if not whole:
            self.missing = [at for at in shards if all(g[base + at] < 0 for g, base in every)]

    def rank_at(self, replica: int, index: int) -> int:
        """Return the rank at an index of a replica; if the group lacks it, that of the next one."""
        for turn in range(len(self.replicas)):
            grid, base = self.replicas[(replica + turn) % len(self.replicas)]
            if grid[base + index] >= 0:
                return grid[base + index]
        raise ValueError(_INCOMPLETE)


def _each_rank_once(grids: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return grids in which a rank counts in the first that it is in, as in `Mesh.index_of`."""
    placed: set[int] = set()
    found: list[tuple[int, ...]] = []
    for grid in grids:
        found.append(tuple([-1 if rank in placed else rank for rank in grid]))
        placed.update(grid)
    return tuple(found)


def _sums(dims: Sequence[tuple[int, int]]) -> list[int]:
    """Return the indices of a mesh of which only some dimensions are looked at."""
    return [sum(at) for at in product(*[range(0, size * step, step) for size, step in dims])]


class HeldSlab(NamedTuple):
    """Consecutive elements [first, stop) that the same ranks hold, interleaved.

    Attributes:
        base: what the holders' indices in the mesh have in common.
        number: of this slab among those of the same holders.
    """

    first: int
    stop: int
    base: int
    number: int


class Strip(NamedTuple):
    """What a rank holds of a slab.

    Attributes:
        first, stop: from the first element that it has of the slab to the end of its last.
        low, high: indices in the last dimension that is split.
    """

    first: int
    stop: int
    low: int
    high: int


class MeshHolders(Holders):
    """A tensor that a mesh splits.

    Attributes:
        last: the last dimension that is split, as a `SplitDim`.
        strip_numel: elements that a holder has side by side, at most.
        strips: what this rank has of each slab.
        slabs: how many slabs a holder has, at most.
        slab_numel: elements of a slab, at most.
        runs: how often the same is held in several runs, at most.
    """

    def __init__(self, shape: tuple[int, ...], ranks: MeshRanks, replica: int) -> None:
        """Look at one replica.

        Raises:
            ValueError: no rank of the group has some of the tensor.
        """
        if any(boxes_at(shape, ranks.mesh, at) for at in ranks.missing):
            raise ValueError(_INCOMPLETE)
        self._shape, self._ranks = shape, ranks
        self._replica = replica
        self._grid, self._base = ranks.replicas[replica]
        self._strides = contiguous_stride(shape)
        self._dims: dict[int, SplitDim] = {}
        for dim, size in enumerate(shape):
            axes = [
                Axis(ranks.mesh.shape[at], factor, ranks.steps[at])
                for at, factor in split_order(dim, ranks.mesh)
            ]
            if any(axis.shards > 1 or axis.factor > 1 for axis in axes):
                self._dims[dim] = SplitDim(size, axes)
        at = max(self._dims, default=0)
        self.last = self._dims.setdefault(at, SplitDim(shape[at], ()))
        self._last, self._stride = at, self._strides[at]
        self._outer = max((dim for dim in self._dims if dim < at), default=-1)
        self.is_stored = prod(shape[:at]) == 1
        self.strip_numel = self.last.at(0).after * self._stride
        self.slabs = prod(
            self._dims[dim].at(0).after if dim in self._dims else shape[dim]
            for dim in range(self._outer)
        )
        first = self.slab_at(0)
        self.slab_numel = first.stop
        self.runs = prod(dim.parts for dim in self._dims.values())
        self._parts: dict[tuple[int, int], Sequence[tuple[Box, int]]] = {}
        self._own_parts: dict[tuple[int, int], Sequence[Box]] = {}
        self._own = self._boxes()
        self.strips = sorted(strip for box in self._own for strip in self._strips_of(box))
        self.spans = [(strip.first, strip.stop) for strip in self.strips]

    def holder_at(self, element: int) -> tuple[int, int]:
        index = 0
        for dim, split in self._dims.items():
            run = split.at(element // self._strides[dim] % self._shape[dim])
            index += run.mesh_index
            if dim == self._last:
                stop = element + run.after * self._stride - element % self._stride
        return self.rank_at(index), stop

    def rank_at(self, index: int) -> int:
        """Return the rank at an index of the replica."""
        rank = self._grid[self._base + index]
        return rank if rank >= 0 else self._ranks.rank_at(self._replica, index)

    def slab_at(self, element: int) -> HeldSlab:
        """Return the slab that has an element."""
        if self._outer < 0:
            return HeldSlab(0, prod(self._shape), 0, 0)
        base = number = 0
        for dim in range(self._outer + 1):
            at = element // self._strides[dim] % self._shape[dim]
            run = Run(0, at, self._shape[dim] - at)
            if dim in self._dims:
                run = self._dims[dim].at(at)
            base += run.mesh_index
            if dim < self._outer:
                number = number * (run.before + run.after) + run.before
        stride = self._strides[self._outer]
        first = element - element % stride - run.before * stride
        return HeldSlab(first, first + (run.before + run.after) * stride, base, number)

    def _boxes(self) -> Sequence[Box]:
        """Return what this rank has, none if it is not in the replica that is looked at."""
        if self._ranks.index is None:
            return ()
        found = boxes_at(self._shape, self._ranks.mesh, self._ranks.index)
        if found and self.holder_at(span_of(self._shape, found[0])[0])[0] != self._ranks.rank:
            return ()
        return found

    def _strips_of(self, box: Box) -> Iterator[Strip]:
        """Yield what a box is of each slab."""
        inner = max(self._outer, 0)
        offsets, sizes = box
        low, high = offsets[self._last], offsets[self._last] + sizes[self._last]
        for at in product(
            *[range(offsets[dim], offsets[dim] + sizes[dim]) for dim in range(inner)]
        ):
            part = Box((*at, *offsets[inner:]), (*[1] * inner, *sizes[inner:]))
            yield Strip(*span_of(self._shape, part), low, high)

    def parts(self, first: int, stop: int) -> Sequence[tuple[Box, int]]:
        found = self._parts.get((first, stop))
        if found is None:
            rows = boxes_of_range(self._shape, first, stop)
            rank, end = self.holder_at(first)
            if stop <= end:
                found = [(row, rank) for row in rows]
            else:
                found = [part for row in rows for part in self._cut(row)]
            if len(found) <= _PARTS_KEPT and len(self._parts) < _KEPT:
                self._parts[first, stop] = found
        return found

    def _cut(self, row: Box) -> Iterator[tuple[Box, int]]:
        """Yield a box as the parts of its holders."""
        ends = [
            list(self._dims[dim].runs(first, first + size))
            if dim in self._dims
            else [(first, size, 0)]
            for dim, (first, size) in enumerate(zip(*row, strict=True))
        ]
        for cut in product(*ends):
            offsets, sizes, index = zip(*cut, strict=True)
            yield Box(offsets, sizes), self.rank_at(sum(index))

    def own_parts(self, first: int, stop: int) -> Sequence[Box]:
        if not self.spans or stop <= self.spans[0][0] or self.spans[-1][1] <= first:
            return ()
        found = self._own_parts.get((first, stop))
        if found is None:
            rows = boxes_of_range(self._shape, first, stop)
            every = [intersect(row, box) for row in rows for box in self._own]
            found = [box for box in every if box is not None]
            if len(found) <= _PARTS_KEPT and len(self._own_parts) < _KEPT:
                self._own_parts[first, stop] = found
        return found
