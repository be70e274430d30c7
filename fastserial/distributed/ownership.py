"""Which rank writes which blocks of the file, for as much of the file as somebody asks.

Ranks that share tensors are a unit: all ranks of a job, or those of a pipeline stage. Among units
the file is divided by whole records; within a unit, by who holds what. So a rank looks at the
shards of its own unit only, whatever the number of others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from fastserial.distributed.covers import Cover, cover_of
from fastserial.distributed.division import GRAIN, Blocks, Owned, Runs, blocks_in, divide
from fastserial.distributed.pieces import Flat, Mesh, TensorSpec

__all__ = ["Ownership"]

Records = Sequence[tuple[int, int, int, int]]
_RANK_0 = (0,)


class Ownership:
    """Who writes what.

    Attributes:
        unit_of: the unit of each rank.
        elsewhere: what is written outside its own unit, or lies between two, in file order. The
            same on every rank.
    """

    def __init__(
        self,
        nbytes: int,
        records: Records,
        writers: Sequence[int],
        specs: Sequence[TensorSpec],
        size: int,
    ) -> None:
        """Divide the file among the units.

        Args:
            nbytes, records, writers: see `FilePlan`.
            specs: of the sources.
            size: of the group.
        """
        self._specs, self._size = specs, size
        self.unit_of = _units(specs, size)
        self._blocks = -(-nbytes // GRAIN)
        share, more = divmod(self._blocks, len(writers))
        self._left = {rank: share + (index < more) for index, rank in enumerate(writers)}
        self._home: dict[int, list[Blocks]] = {}
        self._cut: set[int] = set()  # units of which not all is written at home
        self._records: dict[int, list[tuple[int, TensorSpec]]] = {}
        self._container: list[Blocks] = []  # bytes that rank 0 has, within its unit
        self.elsewhere = list(self._divide(nbytes, records))

    def cover(self, spec: TensorSpec) -> Cover:
        """Return who holds what of a tensor.

        Raises:
            ValueError: nobody holds some of it.
        """
        return cover_of(spec.shape, spec.held, self._size)

    def within(self, unit: int) -> list[Owned]:
        """Return who of a unit writes what of its own, in file order.

        Raises:
            ValueError: nobody holds some of a tensor.
        """
        home = self._home.get(unit, [])
        left = {rank: n for rank, n in self._left.items() if self.unit_of[rank] == unit}
        alone: list[tuple[int, int, tuple[int, ...]]] = []
        several: list[tuple[int, int, tuple[int, ...]]] = []
        parts: list[tuple[int, int, tuple[int, ...]]] = []
        own = list(self._container) if unit == self.unit_of[0] else []
        for offset, spec in self._records.get(unit, ()):
            if not spec.nbytes:
                continue
            item = spec.dtype.itemsize
            cover = self.cover(spec)
            for first, stop, ranks in cover.runs:
                if ranks == _RANK_0:
                    own.append((offset + first * item, offset + stop * item))
                    continue
                begin = -(-(offset + first * item) // GRAIN)
                end = (offset + stop * item) // GRAIN
                if begin < end:
                    (several if len(ranks) > 1 else alone).append((begin, end, ranks))
            for first, stop, ranks in cover.parts:
                begin, end = blocks_in(offset + first * item, offset + stop * item)
                if begin < end:
                    parts.append((begin, end, ranks))
        if own:
            alone = sorted([*alone, *_joined(own)])
        if unit in self._cut:
            alone, several, parts = (list(_clipped(runs, home)) for runs in (alone, several, parts))
        return divide(home, alone, several, parts, left)

    def _divide(self, nbytes: int, records: Records) -> Iterator[Owned]:
        """Divide the file among the units, and among their ranks what is not the units' own."""
        room: dict[int, int] = {}
        members: dict[int, list[int]] = {}
        for rank, count in self._left.items():
            unit = self.unit_of[rank]
            room[unit] = room.get(unit, 0) + count
            members.setdefault(unit, []).append(rank)
        alone, everyones = self._spans(nbytes, records)
        units = tuple(room)
        several = [(first, stop, units) for first, stop in everyones]
        whole = [(0, self._blocks)] if self._blocks else []
        abroad: list[Owned] = []
        ours = {(first, unit) for first, _, (unit,) in alone}
        away: dict[int, int] = {}
        for first, stop, (unit,) in alone:
            away[unit] = away.get(unit, 0) + stop - first
        for owned in divide(whole, alone, several, (), room):
            first, stop, unit, direct = owned
            if direct and (first, unit) in ours:
                self._home.setdefault(unit, []).append((first, stop))
                away[unit] -= stop - first
            else:
                abroad.append(owned)
        self._cut = {unit for unit, count in away.items() if count}
        totals: dict[int, int] = {}
        for first, stop, unit, _ in abroad:
            totals[unit] = totals.get(unit, 0) + stop - first
        takers = {unit: _Takers(members[unit], total, self._left) for unit, total in totals.items()}
        for first, stop, unit, direct in abroad:
            for begin, end, rank in takers[unit].take(first, stop):
                yield Owned(begin, end, rank, direct)

    def _spans(
        self, nbytes: int, records: Records
    ) -> tuple[list[tuple[int, int, tuple[int]]], list[Blocks]]:
        """Return the blocks that are a unit's own, and those of records that everyone has."""
        spans: list[tuple[int, int, int]] = []
        everyones: list[Blocks] = []
        units: dict[int, int | None] = {}
        begin, at, unit = 0, 0, self.unit_of[0]
        before: int | None = unit
        for _, source, offset, length in records:
            spec = self._specs[source] if source >= 0 else None
            mine: int | None = self.unit_of[0]
            if spec is not None:
                key = id(spec.held)
                if key not in units:
                    member = next(_members(spec.held), 0)
                    units[key] = None if spec.held is None else self.unit_of[member]
                mine = units[key]
                if mine is not None:
                    self._records.setdefault(mine, []).append((offset, spec))
            if mine == before == self.unit_of[0]:
                self._container.append((at, offset))
            if spec is None:
                self._container.append((offset, offset + length))
            before = mine
            if mine != unit and mine is not None:
                spans.append((begin, at, unit))
                begin, unit = offset, mine
            elif mine is None and spec is not None:
                first, stop = blocks_in(offset, offset + length)
                if first < stop:
                    everyones.append((first, stop))
                    spans.append((begin, offset, unit))
                    begin = offset + length
            at = offset + length
        if before == self.unit_of[0]:
            self._container.append((at, self._blocks * GRAIN))
        spans.append((begin, self._blocks * GRAIN, unit))
        alone = [(*blocks_in(first, stop), (unit,)) for first, stop, unit in spans]
        return [run for run in alone if run[0] < run[1]], everyones


class _Takers:
    """Ranks of a unit that take blocks in turn, each the same number, in file order."""

    def __init__(self, ranks: Sequence[int], total: int, left: dict[int, int]) -> None:
        share, more = divmod(total, len(ranks))
        self._queue = []
        for index, rank in enumerate(sorted(ranks, key=lambda rank: -left[rank])):
            count = share + (index < more)
            left[rank] -= count
            self._queue.append([rank, count])
        self._at = 0

    def take(self, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield who takes what of some blocks."""
        while first < stop:
            rank, count = self._queue[self._at]
            count = min(count, stop - first)
            if count:
                yield first, first + count, rank
                first += count
                self._queue[self._at][1] -= count
            if not self._queue[self._at][1]:
                self._at += 1


def _joined(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield the blocks in ranges of bytes that rank 0 has; small ones side by side fill blocks."""
    first = stop = -1
    for begin, end in [*sorted(ranges), (-1, -1)]:
        if begin == stop:
            stop = end
            continue
        blocks = blocks_in(first, stop)
        if blocks[0] < blocks[1]:
            yield *blocks, _RANK_0
        first, stop = begin, end


def _members(held: Mesh | Flat | None) -> Iterator[int]:
    if isinstance(held, Mesh):
        yield from (rank for grid in held.grids for rank in grid if rank >= 0)
    elif held is not None:
        yield from (rank for rank, _, _ in held.ranges)


def _units(specs: Sequence[TensorSpec], size: int) -> list[int]:
    """Return of each rank the first one of those with which it shares tensors."""
    above = list(range(size))

    def top(rank: int) -> int:
        while above[rank] != rank:
            above[rank] = rank = above[above[rank]]
        return rank

    seen: set[int] = set()
    for spec in specs:
        if id(spec.held) not in seen:
            seen.add(id(spec.held))
            first = -1
            for rank in _members(spec.held):
                rank = top(rank)
                if first < 0:
                    first = rank
                elif rank != first:
                    first, other = min(first, rank), max(first, rank)
                    above[other] = first
    return [top(rank) for rank in range(size)]


def _clipped(runs: Sequence[tuple[int, int, tuple[int, ...]]], ranges: Sequence[Blocks]) -> Runs:
    """Return what of some runs lies within ranges."""
    firsts = [first for first, _ in ranges]
    for first, stop, ranks in runs:
        at = max(bisect_right(firsts, first) - 1, 0)
        while at < len(ranges) and ranges[at][0] < stop:
            begin, end = max(first, ranges[at][0]), min(stop, ranges[at][1])
            if begin < end:
                yield begin, end, ranks
            at += 1
