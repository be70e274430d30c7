"""What this rank does in a save: which of its memory it writes, and which bytes travel when.

Every rank makes its own schedule from the same plan; what one sends, another one expects. What an
owner does not have as it is in the file, it puts together in tiles. All such ranges, in file order,
are cut into tiles of equal size; a round is a tile of every owner. In a tile, bytes lie as in the
file.

A schedule holds ranges of the file only. The moves of a round are made when it is due.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from fastserial.distributed.plan.division import FilePlan, owned_ranges
from fastserial.distributed.sharding.boxes import Box, within
from fastserial.distributed.sharding.pieces import TensorSpec

CONTAINER = -1  # instead of a source: the zip's own bytes, which rank 0 has


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


class TileRange(NamedTuple):
    """Bytes [first, stop) of the file that lie in the owner's tile, from byte `at` of it on."""

    owner: int
    at: int
    first: int
    stop: int


class Move(NamedTuple):
    """Elements that travel between a rank's memory and a tile.

    Attributes:
        piece: of the file.
        tile: where it begins in the tile (bytes), which only the owner uses.
        box: what the sender holds; None: rank 0 alone has the piece.
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


class Schedule:
    """What a rank does.

    Attributes:
        nbytes: how many bytes it writes.
        rounds: those in which this rank has a part: by their number the tiles, as far as it has a
            part of them; its own tiles are complete.
    """

    def __init__(
        self, plan: FilePlan, specs: Sequence[TensorSpec], rank: int, size: int, tile_bytes: int
    ) -> None:
        """Decide it.

        Args:
            specs: of the sources.
            rank, size: of the group.
            tile_bytes: of a tile, but for the last one of an owner.

        Raises:
            ValueError: nobody holds some of a tensor.
        """
        self.nbytes = 0
        self._plan, self._specs, self._rank, self._size = plan, specs, rank, size
        self._starts = [offset for _, _, offset, _ in plan.records]
        self._own: list[tuple[int, int]] = []  # what this rank has as it is in the file (bytes)
        rounds: dict[int, list[TileRange]] = {}
        ends = [0] * size  # of what each owner puts together so far (bytes)
        for first, stop, owner, ranks in owned_ranges(plan, specs, size):
            if owner == rank:
                self.nbytes += stop - first
            if not ranks:
                self._own += [(first, stop)] if owner == rank else []
                continue
            at = ends[owner]
            ends[owner] += stop - first
            while first < stop and (owner == rank or rank in ranks):
                number, used = divmod(at, tile_bytes)
                end = min(stop, first + tile_bytes - used)
                rounds.setdefault(number, []).append(TileRange(owner, used, first, end))
                at += end - first
                first = end
        self.rounds = dict(sorted(rounds.items()))

    def own_pieces(self) -> Iterator[FileRange]:
        """Return what this rank writes from its own memory, in file order."""
        for first, stop in self._own:
            yield from self._pieces(first, stop)

    def round(self, number: int) -> Round:
        """Return what travels in a round, and what the tile of this rank then holds.

        Sender and owner find the same moves in the same order.
        """
        found = Round()
        for owner, at, first, stop in self.rounds[number]:
            for piece in self._pieces(first, stop):
                tile = at + piece.offset - first
                if owner == self._rank:
                    found.pieces.append((piece, tile))
                for box, part, ranks in self._parts_of(piece):
                    sender = owner if owner in ranks else ranks[owner % len(ranks)]
                    move = Move(piece, tile, box, part)
                    if sender == self._rank:
                        found.sends.setdefault(owner, []).append(move)
                    if owner == self._rank:
                        found.receives.setdefault(sender, []).append(move)
        return found

    def _pieces(self, first: int, stop: int) -> Iterator[FileRange]:
        """Cut bytes of the file at the ends of records."""
        records = self._plan.records
        index = max(bisect_right(self._starts, first) - 1, 0)
        at = first
        while at < stop and index < len(records):
            number, source, offset, nbytes = records[index]
            if at < offset:
                end = min(offset, stop)
                yield FileRange(at, end - at, CONTAINER, CONTAINER, at)
                at = end
            end = min(offset + nbytes, stop)
            if at < end:
                yield FileRange(at, end - at, number, source, at - offset)
                at = end
            index += 1
        if at < stop:
            yield FileRange(at, stop - at, CONTAINER, CONTAINER, at)

    def _parts_of(
        self, piece: FileRange
    ) -> Iterator[tuple[Box | None, Box | None, tuple[int, ...]]]:
        """Yield the boxes of a piece, the part of each that is in it, and the ranks that hold it.

        Blocks end between elements: records begin at multiples of the size of any.
        """
        if piece.source < 0:
            yield None, None, (0,)
            return
        spec = self._specs[piece.source]
        item = spec.dtype.itemsize
        first, stop = piece.start // item, (piece.start + piece.length) // item
        for box, ranks, begin, end in self._plan.cover(piece.source, spec, self._size).held:
            if begin < stop and first < end:
                for part in _parts(spec.shape, box, first, stop):
                    yield box, part, ranks


@lru_cache(maxsize=4096)  # tensors of a model are alike
def _parts(shape: tuple[int, ...], box: Box, first: int, stop: int) -> tuple[Box, ...]:
    return tuple(within(shape, box, first, stop))
