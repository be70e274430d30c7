"""Which rank reads which part of a checkpoint: by formula, each rank for itself.

What one rank wants alone it reads itself. What several want is cut into slabs; those that the same
ranks want are put in a row, of which each of these ranks reads an equal range, a window at a time.
So every rank of such a group knows what the others read, and in which of their windows it is; and
it looks at nothing but what it wants itself. No element is read by two ranks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator
from math import prod

from fastserial.distributed.layout.boxes import Box, span_of
from fastserial.distributed.layout.grid import Grid
from fastserial.distributed.load.part_reader import ReadTarget, Window, WindowPiece
from fastserial.distributed.load.wanted import Demands

# Bytes: smaller parts of an array are read together with what is near them, and by one rank. More
# than the gaps that `loading.reader` reads along, so that nobody reads what others do.
_FINEST = 256 * 1024
_CUTS = 4  # larger ones are cut at multiples of a quarter of that
_LARGEST_WINDOW = 8 * 1024 * 1024  # bytes; two of them are in memory
_SENT_AT_ONCE = 24 * 1024 * 1024  # bytes by a rank, as many received, and as many to be converted
_PAGE = 4096
_ALIGN = 16  # bytes of the largest elements


class ReadGroup:
    """What the same ranks want, some of each slab; each of them reads an equal range of its bytes.

    Attributes:
        members: the ranks, in order.
        size: bytes of a window.
    """

    def __init__(self, members: tuple[int, ...]) -> None:
        self.members = members
        self._slabs: list[tuple[Grid, int, int]] = []
        self._starts = [0]  # bytes, in the row of slabs
        self._grain = 0  # most bytes that are not cut
        size = min(_LARGEST_WINDOW, _SENT_AT_ONCE // max(1, len(members) - 1))
        self.size = max(size - size % _PAGE, _PAGE)

    def add(self, grid: Grid, first: int, stop: int) -> None:
        """Add elements [first, stop) of an array; all members add the same in the same order."""
        self._slabs.append((grid, first, stop))
        nbytes = (stop - first) * grid.itemsize
        nbytes += -nbytes % _ALIGN
        self._starts.append(self._starts[-1] + nbytes)
        self._grain = max(self._grain, _grain(nbytes))

    @property
    def rounds(self) -> int:
        """No member has more windows."""
        most = -(-self._starts[-1] // len(self.members)) + self._grain
        return -(-min(most, self._starts[-1]) // self.size)

    @property
    def window_bytes(self) -> int:
        """The bytes of a buffer for any window."""
        return min(self.size, self._starts[-1])

    def window(self, member: int, number: int) -> Window:
        """Return a member's window, empty after its last.

        Args:
            member: its index.
            number: of the window.
        """
        low = self._cut(member) + number * self.size
        high = min(low + self.size, self._cut(member + 1))
        found: Window = []
        at = bisect_right(self._starts, low) - 1
        while low < high and at < len(self._slabs) and self._starts[at] < high:
            grid, first, stop = self._slabs[at]
            item, start = grid.itemsize, self._starts[at]
            begin = max(low, start)
            end = min(stop, first + (high - start) // item)
            begun = first + (begin - start) // item
            if begun < end:  # else there is only what aligns the next slab
                found.append(WindowPiece(grid, begun, end, begin - low))
            at += 1
        return found

    def _cut(self, member: int) -> int:
        """Return where the range of a member begins; no small slab is cut."""
        share = -(-self._starts[-1] * member // len(self.members))
        at = bisect_left(self._starts, share)
        if at == len(self._starts) or self._starts[at] == share:
            return share
        start, stop = self._starts[at - 1], self._starts[at]
        step = _grain(stop - start)
        return min(start + -(-(share - start) // step) * step, stop)


def _grain(nbytes: int) -> int:
    """Return at multiples of which a slab may be cut (bytes)."""
    return nbytes if nbytes <= _FINEST else _FINEST // _CUTS


class ReadPlan:
    """What this rank reads of a checkpoint, and what it gets from others.

    Attributes:
        alone: what it reads for itself.
        shared: what it gets through windows, by the arrays.
        groups: of these, in the same order on all their members.
        whole: arrays of which more is read than is wanted: all that has their checksum.
    """

    def __init__(
        self,
        grids: Collection[Grid],
        targets: Iterable[ReadTarget],
        demands: Demands | None,
        rank: int,
        verify: bool = False,
    ) -> None:
        """Plan.

        Args:
            grids: the arrays of which this rank may want some.
            targets: what this rank wants of them.
            demands: of all ranks; None: each reads what it wants.
            rank: this one.
            verify: where a chunk has a checksum, read all of it if anything.
        """
        self.alone: list[ReadTarget] = []
        self.shared: dict[Grid, list[ReadTarget]] = {}
        self.groups: list[ReadGroup] = []
        self.whole: set[Grid] = set()
        self._verified = {grid for grid in grids if verify and grid.chunk.crc is not None}
        self._rank = rank
        self._groups: dict[int, ReadGroup] = {}  # by the `id` of their members
        self._known: dict[object, tuple[int, int, tuple[int, ...]] | None] = {}
        self._demands = Demands({}) if demands is None else demands
        if demands is None:
            self.alone += targets
            self.whole = self._verified  # nobody knows what the others read
            return
        wanted: dict[Grid, list[ReadTarget]] = {}
        for target in targets:
            if target.grid.tensor.number in demands:
                wanted.setdefault(target.grid, []).append(target)
            else:
                self.alone.append(target)
        for grid in sorted(grids, key=lambda grid: (grid.offset, grid.tensor.number)):
            mine = wanted.get(grid, [])
            for first, stop, members in self._slabs(grid):
                self._take(grid, first, stop, members, mine)
        self.groups = sorted(
            self._groups.values(), key=lambda group: (len(group.members), group.members)
        )

    def steps(self) -> Iterator[tuple[ReadGroup, int]]:
        """Yield groups and the numbers of their windows, in the same order on all ranks.

        So a rank that waits for another one waits for an earlier step of that.
        """
        rounds = [group.rounds for group in self.groups]
        for number in range(max(rounds, default=0)):
            for group, count in zip(self.groups, rounds, strict=True):
                if number < count:
                    yield group, number

    def own_window(self, group: ReadGroup, number: int) -> Window:
        """Return what this rank reads in a step, which may be nothing."""
        return group.window(group.members.index(self._rank), number)

    def sends(self, group: ReadGroup, number: int) -> Iterator[tuple[int, WindowPiece, Box]]:
        """Yield what this rank sends in a step: to whom, and which part of which piece."""
        for piece in self.own_window(group, number):
            for rank in group.members:
                for box in self._demands.boxes(piece.grid, rank) if rank != self._rank else ():
                    for part in piece.within(box):
                        yield rank, piece, part

    def receives(self, group: ReadGroup, number: int) -> Iterator[tuple[int, Grid, Box, Box]]:
        """Yield what this rank receives in a step, for each sender in its order.

        That is from whom, of which array, and of which box that this rank wants which part.
        """
        for index, owner in enumerate(group.members):
            for piece in group.window(index, number) if owner != self._rank else ():
                for box in self._demands.boxes(piece.grid, self._rank):
                    for part in piece.within(box):
                        yield owner, piece.grid, box, part

    def _take(
        self, grid: Grid, first: int, stop: int, members: tuple[int, ...], wanted: list[ReadTarget]
    ) -> None:
        """Take what this rank wants of a slab, which may be nothing."""
        here = [target for target in wanted if first <= span_of(grid.shape, target.box)[0] < stop]
        if len(members) == 1:
            self.alone += here
            return
        self.shared.setdefault(grid, []).extend(here)
        group = self._groups.get(id(members))
        if group is None:
            group = self._groups[id(members)] = ReadGroup(members)
        group.add(grid, first, stop)

    def _slabs(self, grid: Grid) -> Iterable[tuple[int, int, tuple[int, ...]]]:
        """Return the slabs of an array that this rank wants some of: elements, and ranks."""
        number, near = grid.tensor.number, _FINEST // grid.itemsize
        if number not in self._demands:
            return ()
        demand = self._demands.placement_of(number)
        if demand is None or not grid.is_whole:
            return self._mixed(grid, near)
        key = id(demand), grid.shape, grid.order, near
        if key not in self._known:
            found = self._demands.slab(demand, grid, self._rank, near)
            self._known[key] = found and (found[0].first, found[0].stop, found[1])
        known = self._known[key]
        return () if known is None else (known,)

    def _mixed(self, grid: Grid, near: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Yield the slabs of an array of part of a tensor, or wanted in several ways.

        It looks at all boxes that are wanted of it.
        """
        found = _clusters(self._demands.spans(grid), near)
        numel = prod(grid.shape)
        if grid in self._verified and sum(stop - first for first, stop, _ in found) < numel:
            found = [(0, numel, set().union(*[ranks for _, _, ranks in found]))]
            self.whole.add(grid)
        for first, stop, ranks in found:
            if self._rank in ranks:
                yield first, stop, self._demands.group_of(ranks)


def _clusters(
    spans: Iterable[tuple[int, int, list[int]]], near: int
) -> list[tuple[int, int, set[int]]]:
    """Join spans of one array that overlap, and small ones with what is near them.

    Args:
        spans: first element, end and ranks, in order.
        near: elements.
    """
    found: list[tuple[int, int, set[int]]] = []
    for first, stop, some in spans:
        if found:
            begin, end, ranks = found[-1]
            small = min(stop - first, end - begin) < near
            if first < end or (small and first - end < near):
                ranks.update(some)
                found[-1] = begin, max(stop, end), ranks
                continue
        found.append((first, stop, set(some)))
    return found
