"""What this rank does in a save: which of its memory it writes, and which bytes travel when.

Every rank makes its own schedule from the same plan; what one sends, another one expects.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastserial.distributed.boxes import Box, Overlap, overlaps
from fastserial.distributed.covers import Cover, Held, cover_of
from fastserial.distributed.division import FileRun, divide
from fastserial.distributed.pieces import TensorSpec

__all__ = ["CONTAINER", "FilePlan", "Move", "Piece", "Round", "Schedule", "schedule"]

CONTAINER = -1  # instead of a source: the zip's own bytes, which rank 0 has
_ALIGN = 16
_OF_RANK_0 = [Held(Box((), ()), (0,))]


class FilePlan(NamedTuple):
    """The file, as rank 0 tells all ranks.

    Attributes:
        nbytes: its size.
        records: those with data, in file order: number, source, place in the file, bytes. A
            source below 0 is one that rank 0 alone has.
        writers: the ranks that write.
    """

    nbytes: int
    records: list[tuple[int, int, int, int]]
    writers: list[int]


class Piece(NamedTuple):
    """Bytes of the file that belong to one record, or lie between two.

    Attributes:
        offset, length: place in the file (bytes).
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
        tile: where it begins in the tile (bytes).
        box: what the sender holds, and the part of it that travels; None for the container.
        overlap: where it is in the piece.
    """

    piece: Piece
    tile: int
    box: Box | None
    overlap: Overlap | None


@dataclass(slots=True)
class Round:
    """One tile for each owner.

    Attributes:
        sends: what goes to each rank.
        receives: what comes from each rank.
        pieces: what the tile of this rank then holds, and from which of its bytes on.
    """

    sends: dict[int, list[Move]] = field(default_factory=dict)
    receives: dict[int, list[Move]] = field(default_factory=dict)
    pieces: list[tuple[Piece, int]] = field(default_factory=list)


@dataclass(slots=True)
class Schedule:
    """What a rank does.

    Attributes:
        locals: pieces that it writes from its own memory, in file order.
        rounds: as many on every rank.
        nbytes: how many bytes it writes.
        moved_bytes: how many bytes travel between all ranks.
    """

    locals: list[Piece] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    nbytes: int = 0
    moved_bytes: int = 0


def file_runs(plan: FilePlan, specs: Sequence[TensorSpec], size: int) -> Iterator[FileRun]:
    """Return what lies in ranks' memory as it does in the file; the rest of it rank 0 has."""
    at = 0
    for _, source, offset, nbytes in plan.records:
        if source < 0:
            continue
        yield FileRun(at, offset, (0,))
        at = offset + nbytes
        item = specs[source].dtype.itemsize
        for run in cover_of(specs[source], size).runs:
            yield FileRun(offset + run.first * item, offset + run.stop * item, run.ranks)
    yield FileRun(at, plan.nbytes, (0,))


def schedule(
    plan: FilePlan, specs: Sequence[TensorSpec], rank: int, size: int, tile_bytes: int
) -> Schedule:
    """Return what a rank does.

    Args:
        specs: of the sources.
        rank, size: of the group.
        tile_bytes: most bytes of a tile; at least one grain.
    """
    owned = divide(plan.nbytes, file_runs(plan, specs, size), plan.writers)
    covers: list[Cover] = [cover_of(spec, size) for spec in specs]
    made = Schedule()
    cutter = _Cutter(plan)
    filled: dict[int, tuple[int, int]] = {}  # per owner: its round, and the bytes in its tile
    for first, stop, owner in owned:
        if owner == rank:
            made.nbytes += stop - first
        for whole in cutter.pieces(first, stop):
            for piece, held, is_run in _by_runs(whole, covers, specs):
                if is_run and owner in held[0].ranks:
                    if owner == rank:
                        made.locals.append(piece)
                    continue
                made.moved_bytes += piece.length
                for part in _tiles(piece, filled, owner, tile_bytes):
                    _plan_moves(made.rounds, part, owner, rank, held, specs)
    return made


def _by_runs(
    piece: Piece, covers: Sequence[Cover], specs: Sequence[TensorSpec]
) -> Iterator[tuple[Piece, Sequence[Held], bool]]:
    """Cut a piece at the ends of runs; return with each part who may hold what of it.

    And whether that is a run: then all of the part is in the memory of each of those ranks.
    """
    if piece.source < 0:
        yield piece, _OF_RANK_0, True
        return
    cover = covers[piece.source]
    item = specs[piece.source].dtype.itemsize
    _, length, record, source, start = piece
    base = piece.offset - start
    for first, stop, run in cover.cut(start // item, (start + length) // item):
        part = Piece(base + first * item, (stop - first) * item, record, source, first * item)
        if run is None:
            yield part, cover.held, False
        else:
            yield part, [Held(box, run.ranks) for box in run.boxes], True


class _Cutter:
    """Cuts ranges of the file, asked for in order, at the ends of records."""

    def __init__(self, plan: FilePlan) -> None:
        self._records = plan.records
        self._starts = [record[2] for record in plan.records]

    def pieces(self, first: int, stop: int) -> Iterator[Piece]:
        index = max(bisect_right(self._starts, first) - 1, 0)
        at = first
        while at < stop:
            if index == len(self._records):
                yield Piece(at, stop - at, CONTAINER, CONTAINER, at)
                return
            number, source, offset, nbytes = self._records[index]
            if at < offset:
                end = min(offset, stop)
                yield Piece(at, end - at, CONTAINER, CONTAINER, at)
                at = end
            end = min(offset + nbytes, stop)
            if at < end:
                yield Piece(at, end - at, number, source, at - offset)
                at = end
            index += 1


def _tiles(
    piece: Piece, filled: dict[int, tuple[int, int]], owner: int, tile_bytes: int
) -> Iterator[tuple[Piece, int, int]]:
    """Give a piece room in the owner's tiles: parts of it, each with its round and place there."""
    offset, left, record, source, start = piece
    while left:
        index, at = filled.get(owner, (0, 0))
        length = min(left, tile_bytes - at)
        if length < left:
            length -= length % _ALIGN
        if length <= 0:
            filled[owner] = (index + 1, 0)
            continue
        yield Piece(offset, length, record, source, start), index, at
        filled[owner] = (index, at + length + -length % _ALIGN)
        offset += length
        start += length
        left -= length


def _plan_moves(
    rounds: list[Round],
    part: tuple[Piece, int, int],
    owner: int,
    rank: int,
    held: Sequence[Held],
    specs: Sequence[TensorSpec],
) -> None:
    piece, index, at = part
    while len(rounds) <= index:
        rounds.append(Round())
    found = rounds[index]
    if owner == rank:
        found.pieces.append((piece, at))
    if piece.source < 0:
        if rank in (0, owner):
            _note(found, Move(piece, at, None, None), 0, owner, rank)
        return
    spec = specs[piece.source]
    item = spec.dtype.itemsize
    first, stop = piece.start // item, (piece.start + piece.length) // item
    for box, ranks in held:
        sender = owner if owner in ranks else ranks[owner % len(ranks)]
        if rank in (sender, owner):
            for overlap in overlaps(spec.shape, first, stop, box):
                _note(found, Move(piece, at, box, overlap), sender, owner, rank)


def _note(found: Round, move: Move, sender: int, owner: int, rank: int) -> None:
    if sender == rank:
        found.sends.setdefault(owner, []).append(move)
    if owner == rank:
        found.receives.setdefault(sender, []).append(move)
