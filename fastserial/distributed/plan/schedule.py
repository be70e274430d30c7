"""What this rank does in a save: which of its memory it writes, and which bytes travel when.

Every rank makes its own schedule from the same plan; what one sends, another one expects. Blocks
that their owner does not hold, or not in the file's order, it assembles in tiles. All such blocks
of an owner, in file order, are its stream; a round is a tile of every stream.

A schedule holds ranges of the file only. The moves of a round are made when it is due.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from fastserial.distributed.plan.division import GRAIN, Cover, HeldBox, cover_of, owned_blocks
from fastserial.distributed.sharding.boxes import Box, joined, within
from fastserial.distributed.sharding.pieces import TensorSpec
from fastserial.memory.held_settings import paused_collection

CONTAINER = -1  # instead of a source: the zip's own bytes, which rank 0 has
_ALIGN = 16


class FilePlan(NamedTuple):
    """The file, as rank 0 sends it to all ranks.

    Attributes:
        nbytes: its size.
        records: those with data, in file order: number, source, offset in the file, bytes. A
            source below 0 is one that rank 0 alone has.
        writers: the ranks that write.
        checksums: whether the file has CRC-32s.
    """

    nbytes: int
    records: list[tuple[int, int, int, int]]
    writers: list[int]
    checksums: bool = True


class FileRange(NamedTuple):
    """Bytes of the file that belong to one record, or lie between two.

    Attributes:
        offset, length: in the file (bytes).
        record: number of the record; CONTAINER between two.
        source: of the record.
        start: of the piece in the record (bytes).
    """

    offset: int
    length: int
    record: int
    source: int
    start: int


class Move(NamedTuple):
    """Elements that travel between a rank's memory and a tile.

    Attributes:
        piece: of the file.
        tile: where it begins in the tile (bytes), which only the owner uses.
        box: what the sender holds; None for the container.
        part: of the box, which travels.
    """

    piece: FileRange
    tile: int
    box: Box | None
    part: Box | None


@dataclass(slots=True)
class Round:
    """One tile for each owner.

    Attributes:
        sends: moves to each rank.
        receives: moves from each rank.
        pieces: what the tile of this rank then holds, and from which of its bytes on.
    """

    sends: dict[int, list[Move]] = field(default_factory=dict)
    receives: dict[int, list[Move]] = field(default_factory=dict)
    pieces: list[tuple[FileRange, int]] = field(default_factory=list)


class Stream:
    """Blocks that an owner puts together, as far as they concern this rank."""

    def __init__(self) -> None:
        self._starts: list[int] = []  # where each range of blocks begins in the stream (bytes)
        self._ranges: list[tuple[int, int]] = []  # of the file (bytes)
        self._end = 0

    def add(self, start: int, first: int, stop: int) -> None:
        """Append a range of the file that begins at byte `start` of the stream."""
        if self._ranges and self._ranges[-1][1] == first and self._end == start:
            self._ranges[-1] = self._ranges[-1][0], stop
        else:
            self._starts.append(start)
            self._ranges.append((first, stop))
        self._end = start + stop - first

    def tiles(self, nbytes: int) -> range:
        """Return the numbers of the tiles from its first to its last."""
        return range(self._starts[0] // nbytes, -(-self._end // nbytes))

    def within(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Return which bytes of the file are in bytes [begin, end) of the stream."""
        at = max(bisect_right(self._starts, begin) - 1, 0)
        while at < len(self._starts) and self._starts[at] < end:
            first, stop = self._ranges[at]
            shift = first - self._starts[at]
            first, stop = max(first, begin + shift), min(stop, end + shift)
            if first < stop:
                yield first, stop
            at += 1


class Schedule:
    """What a rank does.

    Attributes:
        nbytes: how many bytes it writes.
        tile_bytes: most bytes of a tile, but for the gaps between its pieces.
        streams: by their owner; this rank's own is complete.
    """

    def __init__(
        self, plan: FilePlan, specs: Sequence[TensorSpec], rank: int, size: int, tile_bytes: int
    ) -> None:
        """Decide it.

        Args:
            specs: of the sources.
            rank, size: of the group.
            tile_bytes: most bytes of a tile; a multiple of a grain.

        Raises:
            ValueError: nobody holds some of a tensor.
        """
        self.nbytes = 0
        self.tile_bytes = tile_bytes
        self.streams: dict[int, Stream] = {}
        self._plan, self._specs, self._rank, self._size = plan, specs, rank, size
        self._starts = [offset for _, _, offset, _ in plan.records]
        self._direct: list[tuple[int, int]] = []  # what this rank has as it is in the file (bytes)
        self._fill()
        self._covers: dict[int, tuple[Cover, list[HeldBox]]] = {}
        tiles = [stream.tiles(tile_bytes) for stream in self.streams.values()]
        self.rounds = sorted({number for numbers in tiles for number in numbers})

    def locals(self) -> Iterator[FileRange]:
        """Return what this rank writes from its own memory, in file order."""
        for first, stop in self._direct:
            yield from self._pieces(first, stop)

    def round(self, number: int) -> Round:
        """Return what travels in a round, and what the tile of this rank then holds."""
        found = Round()
        begin, end = number * self.tile_bytes, (number + 1) * self.tile_bytes
        for owner, stream in self.streams.items():
            at = 0
            for first, stop in stream.within(begin, end):
                for piece in self._pieces(first, stop):
                    if owner == self._rank:
                        found.pieces.append((piece, at))
                    self._note(found, piece, at, owner)
                    at += piece.length + -piece.length % _ALIGN
        for moves in (*found.sends.values(), *found.receives.values()):
            # Sender and owner cut pieces differently, so the order must not depend on that.
            moves.sort(key=_elements_of)
        return found

    def _fill(self) -> None:
        """Enter what this rank writes, and what it sends."""
        plan, rank, nbytes = self._plan, self._rank, self._plan.nbytes
        near = joined(self._extents())
        ends = [stop for _, stop in near]
        ends_of: dict[int, int] = {}
        owned = owned_blocks(nbytes, plan.records, plan.writers, self._specs, self._size)
        for begin, end, owner, as_it_is in owned:
            first, stop = begin * GRAIN, min(end * GRAIN, nbytes)
            if as_it_is:
                if owner == rank:
                    self._direct.append((first, stop))
                continue
            start = ends_of.get(owner, 0)
            ends_of[owner] = start + stop - first
            at = bisect_right(ends, first)
            if owner == rank or (at < len(near) and near[at][0] < stop):
                self.streams.setdefault(owner, Stream()).add(start, first, stop)
        self._direct.sort()
        self.nbytes = sum(stop - first for first, stop in self._direct) + ends_of.get(rank, 0)

    def _extents(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of the file, in its order, that contain all that this rank holds."""
        rank, at = self._rank, 0
        known: dict[int, bool] = {}
        for _, source, offset, length in self._plan.records:
            if not rank:
                yield at, offset
            at = offset + length
            if source < 0:
                if not rank:
                    yield offset, at
                continue
            spec = self._specs[source]
            near = known.get(id(spec.held))
            if near is None:
                near = known[id(spec.held)] = spec.is_held_by(rank)
            if near:
                item = spec.dtype.itemsize
                for held in cover_of(spec.shape, spec.held, self._size).held:
                    if rank in held.ranks:
                        yield offset + held.first * item, offset + held.stop * item
        if not rank:
            yield at, self._plan.nbytes

    def _pieces(self, first: int, stop: int) -> Iterator[FileRange]:
        """Cut bytes of the file at the ends of records.

        Where a cut is within a record, it is between elements.
        """
        records = self._plan.records
        index = max(bisect_right(self._starts, first) - 1, 0)
        at = first
        while at < stop:
            if index == len(records):
                yield FileRange(at, stop - at, CONTAINER, CONTAINER, at)
                return
            number, source, offset, nbytes = records[index]
            if at < offset:
                end = min(offset, stop)
                yield FileRange(at, end - at, CONTAINER, CONTAINER, at)
                at = end
            if at < stop and at < offset + nbytes:
                item = self._specs[source].dtype.itemsize if source >= 0 else 1
                start = at - offset
                start -= start % item
                end = nbytes
                if stop < offset + nbytes:
                    end = stop - offset
                    end -= end % item
                if start < end:
                    yield FileRange(offset + start, end - start, number, source, start)
                at = min(stop, offset + nbytes)
            index += 1

    def _note(self, found: Round, piece: FileRange, tile: int, owner: int) -> None:
        """Enter the moves of a piece in which this rank has a part."""
        rank = self._rank
        if piece.source < 0:
            if not rank:
                found.sends.setdefault(owner, []).append(Move(piece, tile, None, None))
            if owner == rank:
                found.receives.setdefault(0, []).append(Move(piece, tile, None, None))
            return
        spec = self._specs[piece.source]
        item = spec.dtype.itemsize
        first, stop = piece.start // item, (piece.start + piece.length) // item
        cover, mine = self._cover(spec)
        for box, ranks, begin, end in cover.held if owner == rank else mine:
            if begin >= stop or first >= end:
                continue
            sender = owner if owner in ranks else ranks[owner % len(ranks)]
            if rank not in (sender, owner):
                continue
            for part in _parts(spec.shape, box, first, stop):
                move = Move(piece, tile, box, part)
                if sender == rank:
                    found.sends.setdefault(owner, []).append(move)
                if owner == rank:
                    found.receives.setdefault(sender, []).append(move)

    def _cover(self, spec: TensorSpec) -> tuple[Cover, list[HeldBox]]:
        """Return which ranks hold what of a tensor, and what this rank holds."""
        found = self._covers.get(id(spec))
        if found is None:
            cover = cover_of(spec.shape, spec.held, self._size)
            mine = [held for held in cover.held if self._rank in held.ranks]
            found = self._covers[id(spec)] = cover, mine
        return found


def _elements_of(move: Move) -> tuple[int, tuple[int, ...]]:
    """Return which elements a move is of, whatever its piece: they are sent in the file's order."""
    return move.piece.record, move.box.offsets if move.box is not None else ()


@lru_cache(maxsize=4096)  # tensors of a model are alike
def _parts(shape: tuple[int, ...], box: Box, first: int, stop: int) -> tuple[Box, ...]:
    return tuple(within(shape, box, first, stop))


def schedule(
    plan: FilePlan, specs: Sequence[TensorSpec], rank: int, size: int, tile_bytes: int
) -> Schedule:
    """Return what a rank does; see `Schedule`."""
    with paused_collection():
        return Schedule(plan, specs, rank, size, tile_bytes)
