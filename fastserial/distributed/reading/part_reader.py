"""Reads parts of tensors from one file: straight to their targets, or through windows.

The CRC-32s of records are taken on the way; what several ranks know of a record is put together
at the end.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from fastserial.checksums import CrcLedger
from fastserial.config.performance import SCATTERED_CHUNK
from fastserial.distributed.reading.windows import (
    ReadTarget,
    Window,
    WindowPart,
    WindowRange,
    buffer_for,
    by_window,
    deliver,
    found_in,
    spans_of,
    windows_of,
)
from fastserial.distributed.sharding.boxes import Box, run_of
from fastserial.distributed.sharding.file_index import Record
from fastserial.loading.reader import FastFileReader
from fastserial.loading.sinks import CheckedSink, DeviceSink, HostSink, ReadExtent, Sink
from fastserial.memory.storages import is_on_host, is_plain

__all__ = ["PartReader"]

_BETWEEN = 512 * 1024 * 1024  # bytes that are read at a stretch, unless one extent has more
_NEAR = 64 * 1024  # bytes nobody wants that are read rather than split a read in two

Run = tuple[int, int]  # bytes of the file, from the first up to the second


class _BoxRead(NamedTuple):
    """A box of a target, and the bytes of the file that are read for it."""

    first: int
    stop: int
    target: ReadTarget
    box: Box


class PartReader:
    """Reads what this rank reads of a file.

    Attributes:
        records: those whose CRC-32s are taken.
        ledger: what is known of these.
    """

    def __init__(
        self,
        reader: FastFileReader,
        records: Sequence[Record] = (),
        *,
        whole: bool = False,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Read nothing yet.

        Args:
            records: whose CRC-32s are to be taken: disjoint, in the order of the file.
            whole: read a record of which anything is wanted as a whole.
            between: called now and then.
        """
        self._reader = reader
        self._whole = whole
        self._between = between
        self.records = records
        self._stops = [record.offset + record.nbytes for record in records]
        self.ledger = CrcLedger([record.nbytes for record in records], [None] * len(records))

    @property
    def bytes_read(self) -> int:
        """Bytes that were read so far."""
        counts = self._reader.blocks.counts
        return counts.direct + counts.cached

    def checks(self, target: ReadTarget) -> bool:
        """Return whether what a target wants lies in one of the records."""
        return self._record_of(*target.grid.span(target.box)) is not None

    def read_own(self, targets: Sequence[ReadTarget], runs: Sequence[Run]) -> None:
        """Fill what lies in runs of the file that no other rank reads.

        Raises:
            CorruptCheckpointError: the file changed meanwhile.
            OSError: it cannot be read.
        """
        straight, rest = self._divided(targets, runs)
        self._read_straight(straight)
        windows = windows_of(rest, SCATTERED_CHUNK)
        buffer = buffer_for(windows)
        for window, pieces in zip(windows, by_window(targets, windows), strict=True):
            self._between()
            self.read_window(window, pieces, buffer)
            for piece in pieces:
                deliver(piece, found_in(buffer, piece))

    def read_window(
        self, window: Window, pieces: Sequence[WindowPart], buffer: torch.Tensor
    ) -> None:
        """Read what pieces need of a window into its buffer.

        Raises:
            CorruptCheckpointError: the file changed meanwhile.
            OSError: it cannot be read.
        """
        spans = window.ranges if self._whole else spans_of(pieces, window, _NEAR)
        self._reader.read_into([one for span in spans for one in self._extents(span, buffer)])

    def _divided(
        self, targets: Sequence[ReadTarget], runs: Sequence[Run]
    ) -> tuple[list[ReadExtent], list[Run]]:
        """Return what can be read straight to its target, and the bytes of all else.

        What is wanted twice is read once, by windows.
        """
        parts = sorted(self._parts(targets, runs), key=lambda part: part[:2])
        self._reader.attend(
            [t.view.untyped_storage() for t in targets if t.view is not None and is_plain(t.view)]
        )
        straight: list[ReadExtent] = []
        rest: list[Run] = []
        place = 0
        while place < len(parts):
            part = parts[place]
            stop, end = part.stop, place + 1
            while end < len(parts) and parts[end].first < stop:
                stop = max(stop, parts[end].stop)
                end += 1
            extent = self._straight(part) if end == place + 1 else None
            if extent is not None:
                straight.append(extent)
            else:
                rest.append((part.first, stop))
            place = end
        return straight, rest

    def _parts(self, targets: Sequence[ReadTarget], runs: Sequence[Run]) -> Iterator[_BoxRead]:
        stops = [stop for _, stop in runs]
        for target in targets:
            begin, end = target.grid.span(target.box)
            place = bisect.bisect_right(stops, begin)
            while place < len(runs) and runs[place][0] < end:
                first, stop = runs[place]
                if first <= begin and end <= stop:
                    yield self._part(begin, end, target, target.box)
                else:
                    for box in target.grid.between(target.box, first, stop):
                        yield self._part(*target.grid.span(box), target, box)
                place += 1

    def _part(self, low: int, high: int, target: ReadTarget, box: Box) -> _BoxRead:
        """Return a part of a target that lies in bytes [low, high) of the file."""
        number = self._record_of(low, high) if self._whole else None
        if number is not None:
            low, high = self.records[number].offset, self._stops[number]
        return _BoxRead(low, high, target, box)

    def _straight(self, part: _BoxRead) -> ReadExtent | None:
        """Return how a part is read to where it belongs, None if its bytes lie otherwise there."""
        grid, view = part.target.grid, part.target.view
        tensor = grid.tensor
        if view is None or view.dtype != tensor.dtype or tensor.pending or not is_plain(view):
            return None
        if run_of(grid.shape, part.box) is None or view.is_conj() or view.is_neg():
            return None
        into = grid.part_of(view, part.target.box, part.box)
        nbytes = into.numel() * into.itemsize
        if not into.is_contiguous() or nbytes != part.stop - part.first:
            return None
        sink: Sink
        if is_on_host(into.untyped_storage()):
            sink = HostSink(into.data_ptr(), nbytes, view)
        else:
            flat = torch.empty(0, dtype=torch.uint8, device=into.device)
            start = int(into.storage_offset()) * into.itemsize
            flat.set_(into.untyped_storage(), start, (nbytes,), (1,))
            sink = DeviceSink(flat, self._reader.ring)
        number = self._record_of(part.first, part.stop)
        if number is not None:
            sink = CheckedSink(sink, self.ledger, number, part.first - self.records[number].offset)
        return ReadExtent(part.first, nbytes, sink)

    def _read_straight(self, extents: Sequence[ReadExtent]) -> None:
        group: list[ReadExtent] = []
        nbytes = 0
        for extent in extents:
            if nbytes + extent.length > _BETWEEN and group:
                self._reader.read_into(group)
                self._between()
                group, nbytes = [], 0
            group.append(extent)
            nbytes += extent.length
        if group:
            self._reader.read_into(group)

    def _extents(self, span: WindowRange, buffer: torch.Tensor) -> Iterator[ReadExtent]:
        """Return how bytes are read to their place in a window's buffer."""

        def into(low: int, high: int) -> HostSink:
            address = buffer.data_ptr() + span.at + low - span.first
            return HostSink(address, high - low, buffer)

        at = span.first
        number = bisect.bisect_right(self._stops, span.first)
        while number < len(self.records) and self.records[number].offset < span.stop:
            begin = self.records[number].offset
            low, high = max(at, begin), min(span.stop, self._stops[number])
            if at < low:
                yield ReadExtent(at, low - at, into(at, low))
            sink = CheckedSink(into(low, high), self.ledger, number, low - begin)
            yield ReadExtent(low, high - low, sink)
            at = high
            number += 1
        if at < span.stop:
            yield ReadExtent(at, span.stop - at, into(at, span.stop))

    def _record_of(self, first: int, stop: int) -> int | None:
        """Return the record in which bytes [first, stop) lie, None if they lie in none."""
        number = bisect.bisect_right(self._stops, first)
        if number == len(self.records) or self.records[number].offset > first:
            return None
        return number if stop <= self._stops[number] else None
