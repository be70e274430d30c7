"""Which rank writes which blocks of the file, and what travels when: arithmetic, no global list.

The file is cut at multiples of `GRAIN`, so that no page is written by two ranks. Each block has one
owner, which every rank can compute for any block:

- what lies within what one rank holds in the order of the file: that rank. A run that is cut by
  the edge of a block belongs to the holder of the block's first byte;
- what several ranks hold interleaved (`Shard(1)`, or shards smaller than a block): the slab's
  blocks are divided among its holders in equal ranges, in their order;
- a block in which a record begins or ends: some holder of the first record that begins in it;
- the container's own bytes: rank 0.

With fewer writers each has a contiguous range of the file instead. Of replicas one is taken for
each tensor, as a whole, the next one as the bytes before it grow: ranks whose replicas differ
unnoticed must not make a tensor of rows of both. Plain tensors are cut among the ranks only if all
their bytes were compared.

Bytes that their owner does not have as they are in the file travel in rounds, of which each owner
puts at most `TILE` bytes together. Consecutive records are one round as long as no owner can get
more; a larger record has several: each owner's part of it is cut into tiles, and the first tiles of
all owners are one round. All ranks go through their rounds in one order.

A rank looks at its own shards, at the owners of blocks that they share with others, and at what it
owns itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from fastserial.distributed.layout.boxes import Box
from fastserial.distributed.layout.holders import (
    HeldSlab,
    Holders,
    MeshHolders,
    MeshRanks,
    RangeHolders,
    Share,
    holders_of_flat,
)
from fastserial.distributed.layout.placement import Flat, Mesh, TensorSpec

# Bytes. Larger, more edges of shards travel; smaller, writes get shorter.
GRAIN = 64 * 1024
TILE = 8 * 1024 * 1024
_TILES = 32 * 1024 * 1024  # of all owners in a round, if each owns a range of the file
_LEAST_CUT = 4  # blocks of a replica that is cut
_SPREAD = 0x9E3779B1  # prime to most numbers: multiples of it, modulo n, are spread over all of n

CONTAINER = -1  # instead of a source: the zip's own bytes, which rank 0 has


class FilePlan(NamedTuple):
    """The file, as rank 0 sends it to all ranks.

    Attributes:
        nbytes: its size.
        records: those with data, in file order: number, source, offset in the file, bytes. A
            source below 0 is one that rank 0 alone has.
        writers: the ranks that write, in order.
        checksums: whether the file has CRC-32s.
        cuts_replicas: whether what several ranks have was compared in whole, and may be divided
            among them.
    """

    nbytes: int
    records: list[tuple[int, int, int, int]]
    writers: list[int]
    checksums: bool = True
    cuts_replicas: bool = False


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
    """Elements that travel between a rank's memory and an owner's tile.

    Attributes:
        piece: of the file.
        part: of the tensor; None: rank 0 alone has the piece, which it sends as bytes.
    """

    piece: FileRange
    part: Box | None


class TileRange(NamedTuple):
    """Bytes [first, stop) of the file that their owner puts together."""

    first: int
    stop: int
    owner: int


Blocks = tuple[int, int]  # from the first on, up to the second
Key = tuple[int, int]  # of a round; rounds are in the order of their keys


class Span(NamedTuple):
    """Blocks [first, stop) that one owner has in one round, if they travel."""

    first: int
    stop: int
    owner: int
    key: Key


@dataclass(slots=True)
class Round:
    """What travels at once.

    Attributes:
        sends: moves to each rank.
        receives: moves from each rank.
        pieces: what the tile of this rank then holds, and from which of its bytes on.
    """

    sends: dict[int, list[Move]] = field(default_factory=dict)
    receives: dict[int, list[Move]] = field(default_factory=dict)
    pieces: dict[FileRange, int] = field(default_factory=dict)


class _Record(NamedTuple):
    """A record, and how its blocks are owned.

    Attributes:
        offset, stop: in the file (bytes).
        item: bytes of an element.
        holders: of its tensor; None: rank 0 alone has it.
        divided: its holders, if its slabs are divided among them.
        shift: where in a slab the division begins.
        window: number of its first round.
        each: blocks of a slab that one owner has, at most.
        tile: blocks of such a part that are in one round.
    """

    offset: int
    stop: int
    item: int
    holders: Holders | None
    divided: MeshHolders | None
    shift: int
    window: int
    each: int
    tile: int

    def inner(self) -> tuple[int, int]:
        """Return the blocks [first, stop) that lie within the record."""
        first = -(-self.offset // GRAIN)
        return first, max(first, self.stop // GRAIN)

    def spans(self, rank: int) -> Sequence[tuple[int, int]]:
        """Return the elements of which a rank has some; see `Holders.spans`."""
        if self.holders is not None:
            return self.holders.spans
        return () if rank else ((0, self.stop - self.offset),)


class Partition:
    """What a rank writes, sends and receives.

    Attributes:
        nbytes: how many bytes it writes.
        rounds: those in which this rank has a part, in order: the tiles, as far as it has a part of
            them; its own tiles are complete.
    """

    def __init__(
        self, plan: FilePlan, specs: Sequence[TensorSpec], rank: int, size: int, tile: int = TILE
    ) -> None:
        """Find it out.

        Args:
            specs: of the sources.
            rank, size: of the group.
            tile: bytes that an owner puts together in one round, but for a few blocks.

        Raises:
            ValueError: nobody holds some of a tensor.
        """
        self._plan, self._specs, self._rank, self._size = plan, specs, rank, size
        self._blocks = -(-plan.nbytes // GRAIN)
        self._starts = [offset for _, _, offset, _ in plan.records]
        self._domains = len(plan.writers) < size
        self._tile = max(
            1, (min(tile, _TILES // len(plan.writers)) if self._domains else tile) // GRAIN
        )
        self._meshes: dict[Mesh, MeshRanks] = {}
        self._holders: dict[object, Holders] = {}
        self._records = self._look_at(tile // GRAIN)
        self._tiles: dict[Key, set[TileRange]] = {}
        self._sent = -1  # the block that was looked at last
        self._own: list[tuple[int, int]] = []  # what this rank has as it is in the file (bytes)
        self.nbytes = 0
        owned, stored = self._find()
        self._owned = sorted(blocks for blocks in owned if blocks[0] < blocks[1])
        for first, stop, is_stored in _split(self._owned, stored):
            self.nbytes += self._end(stop) - first * GRAIN
            if is_stored:
                self._own.append((first * GRAIN, self._end(stop)))
                continue
            for span in self._spans(first, stop):
                self._note(span.key, max(span.first, first), min(span.stop, stop), rank)
        self.rounds = {key: sorted(self._tiles[key]) for key in sorted(self._tiles)}

    # -- records -------------------------------------------------------------------------------

    def _look_at(self, most: int) -> list[_Record]:
        """Return the records; consecutive ones in one window, while no owner has over `most`."""
        plan, specs = self._plan, self._specs
        totals: dict[object, int] = {}
        for _, source, _, nbytes in plan.records:
            if source >= 0:
                kind = _kind(specs[source])
                totals[kind] = totals.get(kind, 0) + nbytes
        before = dict.fromkeys(totals, 0)
        found: list[_Record] = []
        window = used = 0
        seen = -1  # the last block that is counted
        for _, source, offset, nbytes in plan.records:
            item, holders, divided = 1, None, None
            shift = each = blocks = tile = 0
            if source >= 0:
                spec = specs[source]
                item = spec.dtype.itemsize
                kind = _kind(spec)
                holders = self._holders_of(
                    source, offset, Share(2 * before[kind] + nbytes, 2 * totals[kind])
                )
                before[kind] += nbytes
                if isinstance(holders, RangeHolders):
                    blocks = holders.cuts
                elif isinstance(holders, MeshHolders):
                    blocks = holders.runs
                    if not holders.is_stored or holders.strip_numel * item < GRAIN:
                        divided = holders
                        shift = source * _SPREAD % divided.last.size
                        slab = -(-divided.slab_numel * item // GRAIN)
                        longest = divided.last.at(0).after
                        each = -(-longest * slab // divided.last.size)
                        blocks = each * divided.slabs * divided.runs
                        tile = max(1, most // divided.runs)
            begin, end = offset // GRAIN, (offset + nbytes) // GRAIN
            # Of those within it, and of those in which it begins or ends, if they are not counted.
            blocks = min(blocks, end - begin) + (begin > seen) + (end > max(begin, seen))
            seen = end
            if used and used + blocks > most:
                window, used = window + 1, 0
            used += blocks
            found.append(
                _Record(offset, offset + nbytes, item, holders, divided, shift, window, each, tile)
            )
        return found

    def _holders_of(self, source: int, offset: int, share: Share) -> Holders:
        spec = self._specs[source]
        shape, held = spec.shape, spec.held
        key: object
        if isinstance(held, Mesh):
            ranks = self._meshes.get(held)
            if ranks is None:
                ranks = self._meshes[held] = MeshRanks(held, self._rank)
            replica = share.of(len(ranks.replicas))
            key = shape, held, replica
            if key not in self._holders and all(split.dim is None for split in held.splits):
                whole = [(0, spec.numel, ranks.rank_at(replica, 0))]
                self._holders[key] = RangeHolders(shape, whole, self._rank)
            elif key not in self._holders:
                self._holders[key] = MeshHolders(shape, ranks, replica)
            return self._holders[key]
        if isinstance(held, Flat):
            if len(held.ranges) > 1:
                return holders_of_flat(shape, held, share, self._rank)
            rank = held.ranges[0][0] if held.ranges else -1
            key = shape, rank, held.ranges
        elif self._plan.cuts_replicas:
            return self._cut(shape, offset, spec.nbytes)
        else:
            writer = self._domain(offset // GRAIN) if self._domains else share.of(self._size)
            rank = self._plan.writers[writer]
            key = shape, rank
        if key not in self._holders:
            ranges = (
                [(0, spec.numel, rank)] if held is None else [(a, b, r) for r, a, b in held.ranges]
            )
            self._holders[key] = RangeHolders(shape, ranges, self._rank)
        return self._holders[key]

    def _cut(self, shape: tuple[int, ...], offset: int, nbytes: int) -> Holders:
        """Divide a tensor that all ranks have, and that is equal on all, at the edges of blocks."""
        writers = self._plan.writers
        first, stop = -(-offset // GRAIN), (offset + nbytes) // GRAIN
        if self._domains:
            here = range(
                self._domain(offset // GRAIN), self._domain((offset + nbytes - 1) // GRAIN) + 1
            )
            cuts = [(writers[at], self._edge(at)) for at in here]
        else:
            parts = max(1, min(len(writers), (stop - first) // _LEAST_CUT))
            turn = offset // GRAIN
            cuts = [
                (writers[(turn + at) % len(writers)], first + (stop - first) * at // parts)
                for at in range(parts)
            ]
        item = nbytes // max(1, prod(shape))
        begins = [max(0, edge * GRAIN - offset) // item for _, edge in cuts]
        begins[0] = 0
        ends = [*begins[1:], prod(shape)]
        ranges = zip(begins, ends, (rank for rank, _ in cuts), strict=True)
        return RangeHolders(shape, [one for one in ranges if one[0] < one[1]], self._rank)

    # -- owners --------------------------------------------------------------------------------

    def _domain(self, block: int) -> int:
        """Return the number of the writer whose range of the file has a block."""
        writers = len(self._plan.writers)
        return ((block + 1) * writers - 1) // max(1, self._blocks)

    def _edge(self, number: int) -> int:
        """Return the first block of a writer's range of the file."""
        return number * self._blocks // len(self._plan.writers)

    def _spans(self, first: int, stop: int) -> Iterator[Span]:
        """Yield the owners of blocks, in order; the first and the last span may go beyond them."""
        while first < stop:
            span = self._span(first)
            yield span
            first = span.stop

    def _span(self, block: int) -> Span:
        """Return who owns a block, with the blocks around it of the same owner and round."""
        if self._domains:
            number = self._domain(block)
            first, stop = self._edge(number), self._edge(number + 1)
            tile = (block - first) // self._tile
            first += tile * self._tile
            owner = self._plan.writers[number]
            return Span(first, min(first + self._tile, stop), owner, (tile, 0))
        at = block * GRAIN
        index = bisect_left(self._starts, at)
        if index == len(self._starts) or self._starts[index] >= at + GRAIN:
            index -= 1  # no record begins in the block
            if index < 0 or self._records[index].stop <= at:
                return Span(block, block + 1, 0, (0, 0))
        record = self._records[index]
        if record.offset > at or record.stop < at + GRAIN:
            return self._mixed(block, index)
        return self._inner(block, record)

    def _mixed(self, block: int, index: int) -> Span:
        """Return who owns a block in which a record begins or ends."""
        record = self._records[index]
        owner = 0
        if record.holders is not None:
            numel = (record.stop - record.offset) // record.item
            owner, _ = record.holders.holder_at(block * _SPREAD % numel)
        return Span(block, block + 1, owner, (record.window, 0))

    def _inner(self, block: int, record: _Record) -> Span:
        """Return who owns a block within a record."""
        if record.holders is None:
            return Span(*record.inner(), 0, (record.window, 0))
        element = (block * GRAIN - record.offset) // record.item
        if record.divided is None:
            owner, stop = record.holders.holder_at(element)
            end = -(-(record.offset + stop * record.item) // GRAIN)
            return Span(block, min(end, record.inner()[1]), owner, (record.window, 0))
        first, count, slab = self._slab(record, element)
        last = record.divided.last
        index = ((block - first) * last.size + record.shift) // count
        run = last.at(index)
        low, high = _share(record, index - run.before, index + run.after, count)
        done = slab.number * record.each  # blocks of the slabs before
        tile = (done + block - first - low) // record.tile
        begin = first + low + max(0, tile * record.tile - done)
        end = first + min(high, low + (tile + 1) * record.tile - done)
        owner = record.divided.rank_at(slab.base + run.mesh_index)
        return Span(begin, end, owner, (record.window, tile))

    def _slab(self, record: _Record, element: int) -> tuple[int, int, HeldSlab]:
        """Return the first block of a slab, how many it has, and the slab that has an element."""
        if record.divided is None:
            raise ValueError("the record has no slabs")
        slab = record.divided.slab_at(element)
        first, stop = (
            -(-(record.offset + end * record.item) // GRAIN) for end in (slab.first, slab.stop)
        )
        low, high = record.inner()
        return first, min(stop, high) - max(first, low), slab

    # -- this rank -----------------------------------------------------------------------------

    def _find(self) -> tuple[list[Blocks], list[Blocks]]:
        """Return the blocks that this rank owns, and those that it has as they are in the file.

        Notes the tiles of others in which it has a part.
        """
        owned: list[Blocks] = []
        stored: list[Blocks] = []
        if self._rank == 0:
            stored += self._container_blocks()
            owned += stored
            for blocks in stored:
                self._send(*blocks)
        for block, index in self._mixed_blocks():
            owner = self._span(block).owner if self._domains else self._mixed(block, index).owner
            if owner == self._rank:
                owned.append((block, block + 1))
                if self._has_all(block):
                    stored.append((block, block + 1))
            elif self._rank == 0:  # the container's bytes
                self._send(block, block + 1)
        for record in self._records:
            begin, item = record.offset, record.item
            low, high = record.inner()
            for first, stop in record.spans(self._rank):
                at, end = begin + first * item, begin + stop * item
                self._send(at // GRAIN, -(-end // GRAIN))
                if record.divided is None:
                    stored.append((-(-at // GRAIN), end // GRAIN))
                    owned.append((max(low, -(-at // GRAIN)), min(high, -(-end // GRAIN))))
            if record.divided is not None and not self._domains:
                owned += self._divided_blocks(record, record.divided)
        if self._domains:
            here = self._plan.writers.index(self._rank) if self._rank in self._plan.writers else -1
            owned = [(self._edge(here), self._edge(here + 1))] if here >= 0 else []
        return owned, stored

    def _container_blocks(self) -> Iterator[Blocks]:
        """Yield the blocks that have nothing of any record."""
        end = 0
        for record in self._records:
            yield -(-end // GRAIN), record.offset // GRAIN
            end = record.stop
        yield -(-end // GRAIN), self._blocks

    def _mixed_blocks(self) -> Iterator[tuple[int, int]]:
        """Yield each block in which records begin or end, and the first that begins, else ends."""
        seen = -1
        for index, record in enumerate(self._records):
            begin, end = record.offset // GRAIN, record.stop // GRAIN
            if begin != seen and (record.offset % GRAIN or end == begin):
                yield begin, index
                seen = begin
            following = self._starts[index + 1 : index + 2]
            if record.stop % GRAIN and begin < end and end not in [at // GRAIN for at in following]:
                yield end, index

    def _divided_blocks(self, record: _Record, holders: MeshHolders) -> Iterator[Blocks]:
        for strip in holders.strips:
            first, count, _ = self._slab(record, strip.first)
            if count > 0:
                low, high = _share(record, strip.low, strip.high, count)
                yield first + low, first + high

    def _has_all(self, block: int) -> bool:
        """Return whether this rank has all of a block, each piece as one in its memory."""
        for piece, record in self._pieces(block * GRAIN, self._end(block + 1)):
            if record is None or record.holders is None:
                if self._rank:
                    return False
                continue
            if not record.holders.is_stored:
                return False
            first = piece.start // record.item
            stop = first + piece.length // record.item
            if record.holders.holder_at(first)[0] != self._rank or not any(
                low <= first and stop <= high for low, high in record.spans(self._rank)
            ):
                return False
        return True

    def _send(self, first: int, stop: int) -> None:
        """Note the tiles of others that are of these blocks."""
        if stop == first + 1:
            if first == self._sent:  # many small records are in one block
                return
            self._sent = first
        for span in self._spans(first, stop):
            if span.owner != self._rank:
                self._note(span.key, span.first, span.stop, span.owner)

    def _note(self, key: Key, first: int, stop: int, owner: int) -> None:
        tile = TileRange(first * GRAIN, self._end(stop), owner)
        self._tiles.setdefault(key, set()).add(tile)

    def _end(self, block: int) -> int:
        """Return where in the file a block begins, or the file ends."""
        return min(block * GRAIN, self._plan.nbytes)

    # -- what is written, and what travels -----------------------------------------------------

    def own_pieces(self) -> Iterator[FileRange]:
        """Return what this rank writes from its own memory, in file order."""
        for first, stop in self._own:
            for piece, _ in self._pieces(first, stop):
                yield piece

    def owned(self, offset: int, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield what of some bytes of the file lies in this rank's blocks, with its offset."""
        while data:
            block = offset // GRAIN
            length = (block + 1) * GRAIN - offset
            at = bisect_right(self._owned, (block, self._blocks)) - 1
            if at >= 0 and block < self._owned[at][1]:
                yield offset, data[:length]
            offset, data = offset + length, data[length:]

    def round(self, key: Key) -> Round:
        """Return what travels in a round, and what the tile of this rank then holds.

        Sender and owner find the same moves in the same order.
        """
        found = Round()
        rank, at = self._rank, 0
        for first, stop, owner in self.rounds[key]:
            for piece, record in self._pieces(first, stop):
                if owner != rank:
                    moves = [Move(piece, part) for part in self._own_parts(piece, record)]
                    if moves:
                        found.sends.setdefault(owner, []).extend(moves)
                    continue
                found.pieces[piece] = at + piece.offset - first
                for part, sender in self._parts(piece, record):
                    move = Move(piece, part)
                    found.receives.setdefault(sender, []).append(move)
                    if sender == rank:
                        found.sends.setdefault(rank, []).append(move)
            at += stop - first if owner == rank else 0
        return found

    def _own_parts(self, piece: FileRange, record: _Record | None) -> Sequence[Box | None]:
        """Return what this rank has of a piece."""
        if record is None or record.holders is None:
            return () if self._rank else (None,)
        first = piece.start // record.item
        return record.holders.own_parts(first, first + piece.length // record.item)

    def _parts(self, piece: FileRange, record: _Record | None) -> Sequence[tuple[Box | None, int]]:
        """Return the parts of a piece, with the ranks that send them.

        Blocks end between elements: records begin at multiples of the size of any.
        """
        if record is None or record.holders is None:
            return ((None, 0),)
        first = piece.start // record.item
        return record.holders.parts(first, first + piece.length // record.item)

    def _pieces(self, first: int, stop: int) -> Iterator[tuple[FileRange, _Record | None]]:
        """Cut bytes of the file at the ends of records."""
        records = self._plan.records
        index = max(bisect_right(self._starts, first) - 1, 0)
        at = first
        while at < stop and index < len(records):
            number, source, offset, nbytes = records[index]
            if at < offset:
                end = min(offset, stop)
                yield FileRange(at, end - at, CONTAINER, CONTAINER, at), None
                at = end
            end = min(offset + nbytes, stop)
            if at < end:
                yield FileRange(at, end - at, number, source, at - offset), self._records[index]
                at = end
            index += 1
        if at < stop:
            yield FileRange(at, stop - at, CONTAINER, CONTAINER, at), None


def _kind(spec: TensorSpec) -> object:
    """Return what tensors have in common whose bytes are counted together for their replicas."""
    return spec.held if isinstance(spec.held, Mesh) else type(spec.held)


def _share(record: _Record, low: int, high: int, count: int) -> tuple[int, int]:
    """Return which of a slab's blocks belong to the holder of indices [low, high).

    Block j belongs to the holder of index `(j * size + shift) // count`.
    """
    if record.divided is None:
        raise ValueError("the record is not divided")
    size = record.divided.last.size
    first = max(0, -(-(low * count - record.shift) // size))
    return first, max(first, min(count, -(-(high * count - record.shift) // size)))


def _split(owned: Iterable[Blocks], stored: Iterable[Blocks]) -> Iterator[tuple[int, int, bool]]:
    """Yield owned blocks in order, cut where stored ones begin or end, and whether they are such.

    The blocks of both are disjoint; empty ranges are none.
    """
    inside = sorted(blocks for blocks in stored if blocks[0] < blocks[1])
    index = 0
    for first, stop in sorted(owned):
        while first < stop:
            while index < len(inside) and inside[index][1] <= first:
                index += 1
            low, high = inside[index] if index < len(inside) else (stop, stop)
            end = min(stop, high if low <= first else low)
            yield first, end, low <= first
            first = end
