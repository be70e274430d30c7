"""The parts of the file that this rank reads: straight to their targets, or into a window's buffer.

With `verify`, records are read whole as far as they lie in what this rank reads, and checksummed;
what the ranks know of a record is put together at the end.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence

import torch

from fastserial.checksums import CrcLedger
from fastserial.distributed.plan.owners import NeedMap
from fastserial.distributed.plan.tiles import Piece, Range, Target, Window, spans_of
from fastserial.distributed.sharding.boxes import Box, run_of
from fastserial.distributed.sharding.file_index import Record
from fastserial.loading.reader import FastFileReader
from fastserial.loading.sinks import CheckedSink, HostSink, PartsSink, ReadExtent, Sink

__all__ = ["PartReader", "straight_reads"]

_BETWEEN = 512 * 1024 * 1024  # bytes that are read at a stretch, unless one extent has more
_NEAR = 64 * 1024  # bytes nobody wants that are read rather than split a read in two

Run = tuple[int, int]


def straight_reads(
    targets: Sequence[Target], runs: Sequence[Run], file_size: int, block: int
) -> tuple[list[ReadExtent], list[Run], list[Run]]:
    """Find what can be read straight to its target: in the file and there it is one range.

    Args:
        targets: of this rank.
        runs: what this rank reads for itself alone: whole blocks, in order.
        file_size, block: in bytes.

    Returns:
        What can, in order; the runs it lies in; and the runs of blocks of which something cannot.
    """
    others = NeedMap(file_size, block)
    while True:
        left = others.runs()
        kept = list(_without(runs, left))
        reads: list[ReadExtent] = []
        for first, stop, extent in _parts(targets, kept):
            if extent is None:
                others.add(first, stop)
            else:
                reads.append(extent)
        reads.sort(key=lambda one: one.offset)
        end = 0
        for one in reads:
            if one.offset < end:  # wanted twice, to be read once
                others.add(one.offset, min(one.offset + one.length, end))
            end = max(end, one.offset + one.length)
        if others.runs() == left:
            return reads, kept, left


def _parts(
    targets: Sequence[Target], runs: Sequence[Run]
) -> Iterator[tuple[int, int, ReadExtent | None]]:
    """Yield the parts of targets in runs: where they lie, and how they are read straight."""
    stops = [stop for _, stop in runs]
    for target in targets:
        begin, end = target.grid.span(target.box)
        place = bisect.bisect_right(stops, begin)
        while place < len(runs) and runs[place][0] < end:
            first, stop = runs[place]
            for box in target.grid.between(target.box, first, stop):
                low, high = target.grid.span(box)
                yield low, high, _extent(target, box) if high <= stop else None
            place += 1


def _extent(target: Target, box: Box) -> ReadExtent | None:
    grid = target.grid
    view, tensor = target.view, grid.tensor
    if view is None or view.device.type != "cpu" or view.dtype != tensor.dtype or tensor.pending:
        return None
    if run_of(grid.shape, box) is None or view.is_conj() or view.is_neg():
        return None
    into = grid.part_of(view, target.box, box)
    if not into.is_contiguous() or into.numel() != box.numel:
        return None
    nbytes = into.numel() * into.itemsize
    return ReadExtent(grid.position(box.offsets), nbytes, HostSink(into.data_ptr(), nbytes, view))


def _without(runs: Sequence[Run], others: Sequence[Run]) -> Iterator[Run]:
    """Yield what of the runs is in none of the others, both in order."""
    place = 0
    for first, stop in runs:
        while place < len(others) and others[place][1] <= first:
            place += 1
        number = place
        while number < len(others) and others[number][0] < stop:
            if first < others[number][0]:
                yield first, others[number][0]
            first = max(first, others[number][1])
            number += 1
        if first < stop:
            yield first, stop


class PartReader:
    """Reads what this rank reads of the file, each byte once.

    Attributes:
        records: those whose checksums are compared.
        ledger: what is known of these checksums.
        all_checked: whether all that was read is part of such records.
    """

    def __init__(
        self,
        reader: FastFileReader,
        records: Sequence[Record],
        verify: bool,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Read with a reader, comparing the records' checksums if `verify`.

        `between` is called now and then while this rank reads what it alone wants.
        """
        self._reader = reader
        self._between = between
        self.records = [record for record in records if record.crc is not None] if verify else []
        self._stops = [record.offset + record.nbytes for record in self.records]
        sizes = [record.nbytes for record in self.records]
        self.ledger = CrcLedger(sizes, [None] * len(sizes))
        self.all_checked = verify

    @property
    def bytes_read(self) -> int:
        """Bytes that were read so far."""
        counts = self._reader.blocks.counts
        return counts.direct + counts.cached

    def read_straight(self, extents: Sequence[ReadExtent], runs: Sequence[Run]) -> None:
        """Read extents that are in order, without overlaps, in runs of blocks.

        Raises:
            CorruptCheckpointError: the file changed meanwhile.
            OSError: it cannot be read.
        """
        if not self.records:
            self.all_checked = False
            self._read(extents)
            return
        checked: list[ReadExtent] = []
        left = list(extents)
        offsets = [extent.offset for extent in left]
        taken: set[int] = set()
        for first, stop in runs:
            for number, low, high in self._in_records(first, stop):
                place = max(0, bisect.bisect_right(offsets, low) - 1)
                parts: list[tuple[int, int, Sink]] = []
                while place < len(left) and left[place].offset < high:
                    one = left[place]
                    if one.offset >= low and one.offset + one.length <= high:
                        parts.append((one.offset - low, one.length, one.sink))
                        taken.add(place)
                    place += 1
                if parts:
                    whole = len(parts) == 1 and parts[0][1] == high - low
                    sink = parts[0][2] if whole else PartsSink(parts)
                    checked.append(self._checked(number, low, high, sink))
        rest = [extent for place, extent in enumerate(left) if place not in taken]
        self.all_checked &= not rest
        self._read([*checked, *rest])

    def _read(self, extents: Sequence[ReadExtent]) -> None:
        group: list[ReadExtent] = []
        nbytes = 0
        for extent in extents:
            if nbytes + extent.length > _BETWEEN and group:
                self._reader.read_into(group)
                self._between()
                group, nbytes = [], 0
            group.append(extent)
            nbytes += extent.length
        self._reader.read_into(group)

    def read_window(self, window: Window, pieces: Sequence[Piece], buffer: torch.Tensor) -> None:
        """Read what pieces need of a window into its buffer.

        Raises:
            CorruptCheckpointError: the file changed meanwhile.
            OSError: it cannot be read.
        """
        extents: list[ReadExtent] = []
        if self.records:
            pieces = self._check_records(window, pieces, buffer, extents)
        spans = spans_of(pieces, _NEAR)
        self.all_checked &= not spans
        extents += [
            ReadExtent(span.first, span.stop - span.first, _into(buffer, span.at, span))
            for span in spans
        ]
        self._reader.read_into(extents)

    def _check_records(
        self,
        window: Window,
        pieces: Sequence[Piece],
        buffer: torch.Tensor,
        extents: list[ReadExtent],
    ) -> list[Piece]:
        """Read what a window has of the records that pieces are in; return the other pieces."""
        places = [one.at for one in window.ranges]
        rest: list[Piece] = []
        wanted: set[tuple[int, int]] = set()
        for piece in pieces:
            place = bisect.bisect_right(places, piece.source) - 1
            first, last = piece.target.grid.span(piece.box)
            number = bisect.bisect_right(self._stops, first)
            known = number < len(self.records) and self.records[number].offset <= first
            if known:
                wanted.add((place, number))
            if not known or last > window.ranges[place].stop:
                rest.append(piece)
        for place, one in enumerate(window.ranges):
            for number, low, high in self._in_records(one.first, one.stop):
                if (place, number) in wanted:
                    span = Range(low, high, one.at + low - one.first)
                    extents.append(self._checked(number, low, high, _into(buffer, span.at, span)))
        return rest

    def _in_records(self, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield what records have in a range of the file: number, first byte, end."""
        number = bisect.bisect_right(self._stops, first)
        while number < len(self.records) and self.records[number].offset < stop:
            yield number, max(first, self.records[number].offset), min(stop, self._stops[number])
            number += 1

    def _checked(self, number: int, low: int, high: int, sink: Sink) -> ReadExtent:
        start = low - self.records[number].offset
        return ReadExtent(low, high - low, CheckedSink(sink, self.ledger, number, start))


def _into(buffer: torch.Tensor, at: int, span: Range) -> HostSink:
    return HostSink(buffer.data_ptr() + at, span.stop - span.first, buffer)
