"""Writes this rank's part of the file: its own memory while tiles are exchanged, and the tiles."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import NamedTuple

import torch

from fastserial.checksums import CrcLedger, crc32_combine
from fastserial.config import Config
from fastserial.distributed.comm.exchange import (
    Exchange,
    gathered_memory,
    held_in_box,
    held_in_range,
)
from fastserial.distributed.layout.boxes import Box
from fastserial.distributed.save.full_pickle import FileLayout
from fastserial.distributed.save.partition import (
    CONTAINER,
    GRAIN,
    FilePlan,
    FileRange,
    Move,
    Partition,
    Round,
)
from fastserial.distributed.state.tables import RecordSource, devices_of
from fastserial.files.linux import write_all
from fastserial.formats.extents import Data, Extent, Literal, Trailer
from fastserial.interrupts import cleanup, suppress
from fastserial.memory.held_settings import paused_collection
from fastserial.memory.storages import HostMemory, Memory
from fastserial.overlap.snapshot import Snapshot, StoragePart
from fastserial.reasons import Reason
from fastserial.saving.extent_writer import ExtentWriter, Outcome
from fastserial.saving.incremental import Base

_CRC = struct.Struct("<I")
_CRC_AT = 4  # in a data descriptor
_COMPARED = 32 * 1024 * 1024  # bytes that are compared with a base between two signs of life


class WrittenChecksums(NamedTuple):
    """What some ranks know of the CRC-32s of the records.

    Attributes:
        crcs: 4 bytes, little-endian, for each record of the plan; empty if there are no checksums.
        checked: of how many bytes.
    """

    crcs: bytes
    checked: int


def joined_checksums(some: Sequence[WrittenChecksums]) -> WrittenChecksums:
    """Return what several know together."""
    crcs = 0
    for one in some:
        crcs ^= int.from_bytes(one.crcs, "little")
    checked = sum(one.checked for one in some)
    return WrittenChecksums(crcs.to_bytes(len(some[0].crcs), "little"), checked)


class FileEnding(NamedTuple):
    """What is written when all records are.

    Attributes:
        checksums: of all records.
        offset, head: of what follows the records, as far as it is in their last block.
    """

    checksums: WrittenChecksums
    offset: int
    head: bytes


class ShardWriter:
    """Writes what a partition gives this rank.

    Attributes:
        nbytes: how many bytes it writes.
        cloned: how many of them a base had.
        unshared: why not all that is the same in the base could be cloned, or None.
        ledger: the CRC-32s of what it wrote.
        seconds: of the phases `exchange` and `write`, and of `compare` with a base.
    """

    cloned = 0
    unshared: Reason | None = None
    _trailer = 0, b""  # on rank 0: its offset, and the bytes

    def __init__(
        self,
        plan: FilePlan,
        made: Partition,
        sources: Sequence[RecordSource],
        laid_out: FileLayout | None,
    ) -> None:
        """Start with nothing written.

        Args:
            laid_out: the file, on rank 0.
        """
        self._plan = plan
        self._made = made
        self.nbytes = made.nbytes
        self._sources = sources
        self._laid_out = laid_out
        self._checksums = plan.checksums
        self._taken: dict[Move | FileRange, HostMemory] = {}  # what was taken of the state
        sizes = [0] * (max((record for record, *_ in plan.records), default=-1) + 1)
        for record, _, _, nbytes in plan.records:
            sizes[record] = nbytes
        self._sizes = sizes
        self.ledger = CrcLedger(sizes, [None if size else 0 for size in sizes])
        self.seconds = {"exchange": 0.0, "write": 0.0}
        self._uncloned: list[Extent] | None = None

    def freeze(self, taken: Snapshot) -> None:
        """Copy what this rank reads of the state, if there is room."""
        parts: list[StoragePart] = []
        with paused_collection():
            rounds = map(self._made.round, self._made.rounds)
            sends = [move for found in rounds for some in found.sends.values() for move in some]
            moves = [move for move in sends if move.piece.record != CONTAINER]
            pieces = [piece for piece in self._made.own_pieces() if piece.record != CONTAINER]
            for move in moves:
                view = self._view_of(move)
                parts.append(StoragePart(gathered_memory(view, 0, view.nbytes), 0, view.nbytes))
            parts += [self._sources[p.source].part(p.start, p.length) for p in pieces]
            copies = taken.take(parts)
            if copies is None:
                return
            self._taken = dict(zip((*moves, *pieces), copies, strict=True))
        for source in self._sources:
            source.release()

    def clone(self, fd: int, path: str, config: Config, between: Callable[[], None]) -> None:
        """Clone from an earlier file what this rank has as it is there; `write` writes the rest.

        Args:
            between: called now and then.
        """
        self.seconds = {"compare": 0.0, **self.seconds}
        base = Base(path)
        own, self._uncloned = _cut(self._own_extents(), config.block_size), []
        with self._timed("compare"):
            while some := list(_first(own, _COMPARED)):
                base.clone(some, 0, fd, self.ledger, config)
                self._uncloned += base.take_rest()
                self.cloned += base.cloned
                between()
        self.unshared = base.reason

    def write(
        self, fd: int, config: Config, exchange: Exchange, on_progress: Callable[[int], None]
    ) -> Outcome:
        """Write everything but what needs checksums of other ranks (`end`); return what was done.

        Args:
            on_progress: called with the bytes of each piece that is written.

        Raises:
            OSError: a write failed.
            DistributedError: another rank failed.
        """
        out = ExtentWriter(fd, config, on_progress)
        out.expect(self._made.nbytes - self.cloned, devices_of(self._sources))
        with cleanup(out.close), cleanup(exchange.close):
            found = self._own_extents() if self._uncloned is None else self._uncloned
            own = _cut(found, config.block_size)
            self._write_rounds(out, exchange, own, config.block_size * config.queue_depth)
            with self._timed("write"):
                out.write(own, self.ledger)
                out.flush()
        return out.outcome

    def checksums(self) -> WrittenChecksums:
        """Return the part of this rank in the CRC-32s of the records.

        CRC-32 is linear: that of a record is the XOR of those of its pieces, each as if zeros
        followed up to the record's end. So ranks add up what they know, and nobody lists pieces.
        """
        if not self._checksums:
            return WrittenChecksums(b"", 0)
        at = {record: index for index, (record, *_) in enumerate(self._plan.records)}
        crcs, checked = [0] * len(at), 0
        for record, start, length, crc in self.ledger.pieces():
            if length:
                rest = self._sizes[record] - start - length
                crcs[at[record]] ^= crc32_combine(crc, 0, rest)
                checked += length
        return WrittenChecksums(struct.pack(f"<{len(crcs)}I", *crcs), checked)

    def ending(self, found: WrittenChecksums) -> FileEnding:
        """Return what the ranks have to know to write the rest of the file. On rank 0.

        Raises:
            ValueError: the ranks did not write all of it.
        """
        if self._laid_out is None:
            raise ValueError("only rank 0 ends the file")
        late = dict(
            zip((record for record, *_ in self._plan.records), _numbers(found), strict=False)
        )
        if late and found.checked != sum(self._sizes):
            raise ValueError(f"{found.checked} of {sum(self._sizes)} bytes were written")
        trailer = self._laid_out.trailer
        if trailer is None or not isinstance(trailer.source, Trailer):
            return FileEnding(found, 0, b"")
        crcs = [late.get(at, crc or 0) for at, crc in enumerate(self._laid_out.plan.crcs)]
        made = bytes(trailer.source.make(crcs))
        within = -trailer.offset % GRAIN
        self._trailer = trailer.offset + within, made[within:]
        return FileEnding(found, trailer.offset, made[:within])

    def end(self, fd: int, ending: FileEnding) -> None:
        """Write what was not known before: checksums, and what follows the records.

        Each rank what lies in blocks that it has written: no page of the file has two writers.

        Raises:
            OSError: a write failed.
        """
        rest = [(ending.offset, ending.head)]
        for (_, _, offset, nbytes), crc in zip(
            self._plan.records, _numbers(ending.checksums), strict=False
        ):
            rest.append((offset + nbytes + _CRC_AT, _CRC.pack(crc)))
        own = [part for offset, data in rest for part in self._made.owned(offset, data)]
        for offset, data in own:  # else each write waits until the rest of its page is read
            with suppress(OSError):
                os.posix_fadvise(fd, offset, len(data), os.POSIX_FADV_WILLNEED)
        for offset, data in own:
            write_all(fd, memoryview(data), offset)
        if self._laid_out is not None:
            offset, data = self._trailer
            write_all(fd, memoryview(data), offset)

    def _write_rounds(
        self, out: ExtentWriter, exchange: Exchange, own: Iterator[Extent], most: int
    ) -> None:
        """Write the tiles, and of `own` what keeps the disk busy while they are made and travel.

        Args:
            most: bytes of `own` that are queued at once.
        """
        rounds = self._made.rounds
        share = min(most, self._made.nbytes // max(4 * len(rounds), 1) + 1)
        tiles = [torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(2)]
        for index, number in enumerate(rounds):
            self._write(out, _first(own, share))
            with self._timed("exchange"), paused_collection():
                found = self._made.round(number)
                nbytes = _nbytes(found)
                if tiles[index % 2].numel() < nbytes:
                    tiles[index % 2] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
                tile = tiles[index % 2]
                sends = {
                    r: [self._held(move) for move in moves] for r, moves in found.sends.items()
                }
                receives = {
                    r: [self._in_tile(move, tile[found.pieces[move.piece] :]) for move in moves]
                    for r, moves in found.receives.items()
                }
            self._write(out, _first(own, share))
            with self._timed("exchange"):
                step = exchange.begin(sends, receives)
            self._write(out, _first(own, share))
            with self._timed("exchange"):
                step.send()
            self._write(out, _first(own, share))
            with self._timed("exchange"):
                step.end()
            if 0 < index < len(rounds) - 1:
                with self._timed("write"):
                    out.flush()  # the tile before is written, and free for the next round
            self._write(out, self._tile_extents(found, tile))

    def _write(self, out: ExtentWriter, extents: Iterator[Extent]) -> None:
        """Let extents be written, and do not wait for it."""
        with self._timed("write"):
            out.write(extents, self.ledger)
            out.start()

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Count the seconds of the body."""
        began = perf_counter()
        yield
        self.seconds[phase] += perf_counter() - began

    def _held(self, move: Move) -> torch.Tensor:
        """Return what this rank sends of a move."""
        memory = self._taken.get(move)
        if memory is not None:
            shape: tuple[int, ...] = (move.piece.length,)
            dtype = torch.uint8
            if move.part is not None:
                shape = move.part.sizes
                dtype = self._sources[move.piece.source].spec.dtype
            found = torch.empty(shape, dtype=dtype, device="cpu")
            memory.copy_to(found.data_ptr(), 0, found.nbytes)
            return found
        return self._view_of(move)

    def _view_of(self, move: Move) -> torch.Tensor:
        """Return the view of this rank's memory that it sends of a move."""
        if move.part is None:
            return self._held_alone(move.piece)
        view, whole = self._part_of(move.piece, move.part)
        return held_in_box(view, whole, move.part)

    def _held_alone(self, piece: FileRange) -> torch.Tensor:
        """Return bytes that rank 0 alone has."""
        if piece.record != CONTAINER:
            _, memory = self._sources[piece.source].parts[0]
            return memory[piece.start : piece.start + piece.length]
        if self._laid_out is None:
            raise ValueError(f"only rank 0 has {piece}")
        text = bytearray()
        for _, length, source, start in self._laid_out.extents_at(piece.offset, piece.length):
            if isinstance(source, Literal):
                text += memoryview(source.data)[start : start + length]
        return torch.frombuffer(text, dtype=torch.uint8)

    def _part_of(self, piece: FileRange, part: Box) -> tuple[torch.Tensor, Box]:
        """Return what of this rank's memory contains a part, and which box that is."""
        for whole, view in self._sources[piece.source].parts:
            if whole.contains(part):
                return view, whole
        raise ValueError(f"this rank has no {part} of {self._sources[piece.source].key}")

    def _in_tile(self, move: Move, tile: torch.Tensor) -> torch.Tensor:
        """Return where what a move brings belongs, in the bytes from its piece's first one on."""
        piece, part = move
        flat = tile[: piece.length]
        if part is None:
            return flat
        spec = self._sources[piece.source].spec
        first = piece.start // spec.dtype.itemsize
        return held_in_range(flat, spec.dtype, spec.shape, first, part)

    def _tile_extents(self, found: Round, tile: torch.Tensor) -> Iterator[Extent]:
        address = tile.data_ptr()
        for piece, at in found.pieces.items():
            base = address + at - piece.start
            memory = HostMemory(base, self._size_of(piece), tile)
            yield self._extent(piece, memory)

    def _own_extents(self) -> Iterator[Extent]:
        for piece in self._made.own_pieces():
            if piece.record == CONTAINER:
                if self._laid_out is None:
                    raise ValueError(f"only rank 0 has {piece}")
                yield from self._laid_out.extents_at(piece.offset, piece.length)
                continue
            taken = self._taken.get(piece)
            if taken is None:
                memory = self._sources[piece.source].memory(piece.start)
            else:
                address, nbytes = taken.address - piece.start, taken.nbytes + piece.start
                memory = HostMemory(address, nbytes, taken.owner)
            yield self._extent(piece, memory)

    def _extent(self, piece: FileRange, memory: Memory) -> Extent:
        record = piece.record if self._checksums and piece.record != CONTAINER else None
        source = Data(memory, self._size_of(piece), record)
        return Extent(piece.offset, piece.length, source, piece.start)

    def _size_of(self, piece: FileRange) -> int:
        return self._sizes[piece.record] if piece.record != CONTAINER else self._plan.nbytes


def _numbers(checksums: WrittenChecksums) -> tuple[int, ...]:
    return struct.unpack(f"<{len(checksums.crcs) // 4}I", checksums.crcs)


def _cut(extents: Iterable[Extent], block: int) -> Iterator[Extent]:
    """Cut extents where blocks of the file end."""
    for offset, length, source, start in extents:
        end = offset + length
        while offset < end:
            stop = min(end, offset - offset % block + block)
            yield Extent(offset, stop - offset, source, start)
            start += stop - offset
            offset = stop


def _first(extents: Iterator[Extent], nbytes: int) -> Iterator[Extent]:
    """Yield extents until there are `nbytes` of them, the last one whole."""
    while nbytes > 0 and (extent := next(extents, None)) is not None:
        yield extent
        nbytes -= extent.length


def _nbytes(found: Round) -> int:
    """Return how many bytes a tile takes; whole numbers of any type fit."""
    end = max((at + piece.length for piece, at in found.pieces.items()), default=0)
    return end + -end % 16
