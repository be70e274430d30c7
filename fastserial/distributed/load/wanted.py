"""What the ranks want of a file: each tells what it wants, and equal answers travel once.

An answer is a few texts, one for each placement: which arrays are wanted in it. Where all ranks
hold the same tensors these are equal, and only digests are sent. What the other ranks of a DTensor
want follows from its mesh. A `FlatShard` is known to its rank alone: its ranges are always sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fastserial.distributed.comm.distinct import FromRanks
from fastserial.distributed.layout.boxes import Box, boxes_of_range, runs_of, span_of
from fastserial.distributed.layout.file_index import FileTensor
from fastserial.distributed.layout.grid import Grid
from fastserial.distributed.layout.placement import DimShard, Flat, Mesh, boxes_at
from fastserial.distributed.layout.slabs import Slab, indices_with, slab_at
from fastserial.distributed.load.matching import TensorMatch

_RANGES = "[]"  # in place of a placement


@dataclass(eq=False)
class Demand:
    """Ranks that want arrays in one way.

    Attributes:
        mesh: their placement, without ranks; None: in ranges, which each array has its own of.
        grid: the ranks, by their row-major index in the mesh; -1 where none wants anything.
        ranges: by the array's number and the rank: first element and end.
    """

    mesh: Mesh | None
    grid: Sequence[int]
    ranges: dict[int, dict[int, list[tuple[int, int]]]] = field(default_factory=dict)
    _indices: dict[int, int] = field(default_factory=dict)
    _shares: dict[tuple[int, ...], list[tuple[list[Box], list[int]]]] = field(default_factory=dict)

    def index_of(self, rank: int) -> int | None:
        """Return a rank's index in the mesh, None if it wants nothing."""
        if not self._indices:
            self._indices = {one: index for index, one in enumerate(self.grid) if one >= 0}
        return self._indices.get(rank)

    def boxes(self, grid: Grid, rank: int) -> list[Box]:
        """Return which boxes of an array a rank wants."""
        tensor = grid.tensor
        found: list[Box] = []
        if self.mesh is None:
            for first, stop in self.ranges[tensor.number].get(rank, ()):
                found += boxes_of_range(tensor.shape, first, stop)
        elif (index := self.index_of(rank)) is not None:
            found = boxes_at(tensor.shape, self.mesh, index)
        return grid.boxes_of(found)

    def shares(self, tensor: FileTensor) -> list[tuple[list[Box], list[int]]]:
        """Return which boxes of a tensor are wanted, and by which ranks."""
        if self.mesh is None:
            return [
                (boxes_of_range(tensor.shape, first, stop), [rank])
                for rank, some in self.ranges[tensor.number].items()
                for first, stop in some
            ]
        if tensor.shape not in self._shares:
            found: dict[tuple[Box, ...], list[int]] = {}
            for index, rank in enumerate(self.grid):
                if rank >= 0:
                    boxes = tuple(boxes_at(tensor.shape, self.mesh, index))
                    found.setdefault(boxes, []).append(rank)
            self._shares[tensor.shape] = [(list(boxes), ranks) for boxes, ranks in found.items()]
        return self._shares[tensor.shape]


class Demands:
    """What all ranks want of the arrays that this one wants some of."""

    def __init__(self, of_array: Mapping[int, tuple[Demand, ...]]) -> None:
        """Take them, by the numbers of the arrays; each rank wants nothing twice in one demand."""
        self._of_array = of_array
        self._members: dict[object, tuple[int, ...]] = {}
        self._groups: dict[tuple[int, ...], tuple[int, ...]] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._of_array

    def boxes(self, grid: Grid, rank: int) -> list[Box]:
        """Return which boxes of an array a rank wants, each once; all ranks in the same order."""
        demands = self._of_array[grid.tensor.number]
        return list(dict.fromkeys(box for one in demands for box in one.boxes(grid, rank)))

    def spans(self, grid: Grid) -> list[tuple[int, int, list[int]]]:
        """Return from which first element to which last of an array ranks want some, in order."""
        return sorted(
            (*span_of(grid.shape, part), ranks)
            for demand in self._of_array[grid.tensor.number]
            for boxes, ranks in demand.shares(grid.tensor)
            for part in grid.boxes_of(boxes)
        )

    def placement_of(self, number: int) -> Demand | None:
        """Return the one demand of an array if it is a placement, None if there is more to it."""
        demands = self._of_array[number]
        return demands[0] if len(demands) == 1 and demands[0].mesh is not None else None

    def slab(
        self, demand: Demand, grid: Grid, rank: int, least: int
    ) -> tuple[Slab, tuple[int, ...]] | None:
        """Return the slab in which a rank's part is, and the ranks that want some of it.

        Args:
            demand: the array's one placement.
            least: see `slab_at`.
        """
        index = demand.index_of(rank)
        if demand.mesh is None or index is None:
            return None
        slab = slab_at(grid.shape, grid.order, demand.mesh, index, least)
        if slab is None:
            return None
        name = id(demand), slab.shards
        if name not in self._members:
            indices = indices_with(demand.mesh.shape, slab.shards)
            self._members[name] = self.group_of(demand.grid[one] for one in indices)
        return slab, self._members[name]

    def group_of(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """Return some ranks in order; equal ones are the same object (hashing many takes long)."""
        group = tuple(sorted(rank for rank in ranks if rank >= 0))
        return self._groups.setdefault(group, group)


# -- as texts --------------------------------------------------------------------------------------


def texts_of(
    jobs: Iterable[TensorMatch], number_of: Callable[[FileTensor], int | None]
) -> list[bytes]:
    """Return what a rank wants, as equal texts on ranks that want the same.

    Args:
        number_of: by which number it tells of a tensor; None: nothing is said of it.
    """
    numbers: dict[object, set[int]] = {}
    meshes: dict[object, Mesh | None] = {}
    ranges: set[tuple[int, int, int]] = set()
    for tensor, (spec, _, _) in jobs:
        number, held = number_of(tensor), spec.held
        if number is None:
            continue
        if isinstance(held, Flat):
            ranges.update((number, first, stop) for _, first, stop in held.ranges)
            continue
        # To hash all ranks of a mesh takes long; its tensors share them.
        key = None if held is None else (id(held.grids[0]), held.shape, held.splits)
        meshes[key] = held
        numbers.setdefault(key, set()).add(number)
    texts: dict[str, set[int]] = {}
    for which, mesh in meshes.items():
        placement = (mesh.shape, mesh.splits, mesh.grids[0]) if mesh is not None else None
        texts.setdefault(json.dumps(placement), set()).update(numbers[which])
    found = [f"{text}\n{json.dumps(runs_of(some))}" for text, some in texts.items()]
    if ranges:
        found.append(f"{_RANGES}\n{json.dumps(sorted(ranges))}")
    return [text.encode() for text in found]


@dataclass(eq=False)
class _Alike:
    """Ranks that want the same arrays in the same placement, each all of them or on some mesh."""

    whole: set[int] = field(default_factory=set)
    grids: dict[Mesh, list[tuple[int, ...]]] = field(default_factory=dict)

    def add(self, other: _Alike) -> None:
        """Take what another has, too."""
        self.whole |= other.whole
        for mesh, grids in other.grids.items():
            self.grids.setdefault(mesh, []).extend(grids)

    def demands(self) -> Iterator[Demand]:
        """Yield the demands, as few as possible; no rank wants anything twice in one of them."""
        if self.whole:
            yield Demand(Mesh((len(self.whole),), (), (DimShard(None),)), sorted(self.whole))
        for mesh, grids in self.grids.items():
            ranks = [rank for grid in grids for rank in grid if rank >= 0]
            if len(grids) > 1 and len(set(ranks)) == len(ranks):  # sub-meshes have replicas
                shape, splits = (len(grids), *mesh.shape), (DimShard(None), *mesh.splits)
                yield Demand(Mesh(shape, (), splits), [rank for grid in grids for rank in grid])
            else:
                yield from (Demand(mesh, grid) for grid in grids)


def demands_of(found: Iterable[FromRanks]) -> Mapping[int, tuple[Demand, ...]]:
    """Return what all ranks want, by the numbers of the arrays; the same on all ranks.

    Args:
        found: what they say, see `texts_of`.
    """
    ranges = Demand(None, ())
    alike: dict[tuple[object, str], _Alike] = {}
    for text, ranks in found:
        head, _, data = text.decode().partition("\n")
        if head == _RANGES:
            for number, first, stop in json.loads(data):
                some = ranges.ranges.setdefault(number, {})
                for rank in ranks:
                    some.setdefault(rank, []).append((first, stop))
            continue
        shape, splits, grid = json.loads(head) or ((), (), ranks)
        mesh = Mesh(tuple(shape), (), tuple([DimShard(*one) for one in splits]))
        wanting = set(ranks)
        same = alike.setdefault((mesh, data), _Alike())
        if all(split.dim is None for split in mesh.splits):
            same.whole |= wanting.intersection(grid)
        else:
            held = tuple([rank if rank in wanting else -1 for rank in grid])
            same.grids.setdefault(mesh, []).append(held)
    every = list(alike.values())
    which: dict[int, list[int]] = {}
    for at, (_, runs) in enumerate(alike):
        for first, stop in json.loads(runs):
            for number in range(first, stop):
                which.setdefault(number, []).append(at)
    for number in ranges.ranges:
        which.setdefault(number, []).append(-1)
    made: dict[tuple[int, ...], tuple[Demand, ...]] = {}
    of_array: dict[int, tuple[Demand, ...]] = {}
    for number, ways in which.items():
        key = tuple(ways)
        if key not in made:
            together = _Alike()
            for at in ways:
                together.add(every[at] if at >= 0 else _Alike())
            flat = (ranges,) if ways[-1] < 0 else ()
            made[key] = (*together.demands(), *flat)
        of_array[number] = made[key]
    return of_array
