"""Reads parts of tensors from files: directly into their targets, or through windows.

A window is a buffer for pieces of arrays. The rank that reads a window and the ranks that get parts
of it find the same parts in the same order, so only bytes are sent. The CRC-32s of records are
computed during the read; what several ranks know of a record is combined at the end.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch

from fastserial.checkpoints.tensor_read import resolved, sink_of
from fastserial.checksums import CrcLedger
from fastserial.config.performance import SCATTERED_CHUNK
from fastserial.distributed.comm.exchange import INTEGERS
from fastserial.distributed.layout.boxes import Box, joined, run_of, span_of, within
from fastserial.distributed.layout.file_index import Record
from fastserial.distributed.layout.grid import Grid
from fastserial.distributed.load.files import StoredFiles, number_of
from fastserial.loading.reader import CheckedSink, HostSink, ReadExtent, Sink
from fastserial.memory.buffers import Ring
from fastserial.memory.storages import is_plain

_BETWEEN = 512 * 1024 * 1024  # bytes that are read at a stretch, unless one extent has more
_NEAR = 64 * 1024  # bytes nobody wants that are read rather than split a read in two
_ALIGN = 16  # bytes of the largest elements


@dataclass(slots=True, eq=False)  # thousands are made: frozen ones take longer
class ReadTarget:
    """What this rank wants of a tensor.

    Attributes:
        grid: of the tensor.
        box: of the grid's array.
        view: where its elements go.
    """

    grid: Grid
    box: Box
    view: torch.Tensor

    def part(self, box: Box) -> torch.Tensor:
        """Return the part of the view that is a box of the array, in the array's dimensions."""
        return self.grid.part_of(self.view, self.box, box)

    def takes_bytes(self) -> bool:
        """Return whether the bytes of the file are those of the view's memory."""
        view = self.view
        same = view.dtype == self.grid.dtype and not self.grid.tensor.pending
        return same and is_plain(view) and not view.is_conj() and not view.is_neg()

    def deliver(self, box: Box, found: torch.Tensor) -> None:
        """Copy the elements of a box, given as integers; convert them if need be."""
        grid, into = self.grid, self.part(box)
        if not self.takes_bytes():
            into.copy_(resolved(found.view(grid.dtype), grid.tensor.pending))
        elif into.is_complex():
            into.copy_(found.view(grid.dtype))
        else:
            into.view(INTEGERS[grid.itemsize]).copy_(found)


class WindowPiece(NamedTuple):
    """Elements [first, stop) of an array, from byte `at` of a window's buffer on."""

    grid: Grid
    first: int
    stop: int
    at: int

    def within(self, box: Box) -> Iterator[Box]:
        """Yield the parts of a box of the array that the piece has."""
        return within(self.grid.shape, box, self.first, self.stop)

    def found(self, buffer: torch.Tensor, box: Box) -> torch.Tensor:
        """Return a box of the piece as the buffer has it, as integers."""
        item = self.grid.itemsize
        first, _ = span_of(self.grid.shape, box)
        start = self.at // item + first - self.first
        return buffer.view(INTEGERS[item]).as_strided(box.sizes, self.grid.steps, start)


Window = list[WindowPiece]


def windows_of(runs: Iterable[tuple[Grid, int, int]], size: int) -> list[Window]:
    """Cut elements [first, stop) of arrays into windows of up to `size` bytes."""
    windows: list[Window] = []
    room = 0
    for grid, first, stop in runs:
        item = grid.itemsize
        while first < stop:
            if room < _ALIGN:
                windows.append([])
                room = size
            count = min(stop - first, room // item)
            windows[-1].append(WindowPiece(grid, first, first + count, size - room))
            room -= count * item + -(count * item) % _ALIGN
            first += count
    return windows


def buffer_for(windows: Sequence[Window]) -> torch.Tensor:
    """Return memory for any one of some windows."""
    lasts = [window[-1] for window in windows]
    ends = [one.at + (one.stop - one.first) * one.grid.itemsize for one in lasts]
    nbytes = max(ends, default=0)
    return torch.empty(nbytes + -nbytes % _ALIGN, dtype=torch.uint8, device="cpu")


class PartReader:
    """Reads what this rank reads of a checkpoint.

    Attributes:
        records: those whose CRC-32s are taken.
        ledger: what is known of these.
    """

    def __init__(
        self,
        files: StoredFiles,
        records: Sequence[Record] = (),
        *,
        whole: Container[Grid] = (),
        between: Callable[[], None] = lambda: None,
    ) -> None:
        """Read nothing yet.

        Args:
            records: whose CRC-32s are to be taken: disjoint, in the order of their addresses.
            whole: arrays that are read as a whole if anything is wanted of them.
            between: called now and then.
        """
        self._files = files
        self._whole = whole
        self._between = between
        self.records = records
        self._stops = [record.offset + record.nbytes for record in records]
        self.ledger = CrcLedger([record.nbytes for record in records], [None] * len(records))

    def checks(self, target: ReadTarget) -> bool:
        """Return whether what a target wants lies in one of the records."""
        span = span_of(target.grid.shape, target.box)
        return self._record_of(*target.grid.bytes_of(*span)) is not None

    def read_own(self, targets: Sequence[ReadTarget]) -> None:
        """Fill what this rank reads for itself alone, file by file.

        Raises:
            CorruptCheckpointError: a file changed meanwhile.
            OSError: one cannot be read.
        """
        by_file: dict[int, list[ReadTarget]] = {}
        for target in targets:
            by_file.setdefault(number_of(target.grid.offset), []).append(target)
        for number, some in sorted(by_file.items()):
            reader = self._files.open(self._files.names[number])
            reader.attend([one.view.untyped_storage() for one in some if is_plain(one.view)])
            self._read_file(some, reader.ring)

    def _read_file(self, targets: Sequence[ReadTarget], ring: Ring | None) -> None:
        direct, runs, rest = self._divided(targets, ring)
        self._read_direct(sorted(direct, key=lambda extent: extent.offset))
        runs.sort(key=lambda run: run[0].bytes_of(*run[1:]))
        windows = windows_of(runs, SCATTERED_CHUNK)
        buffer = buffer_for(windows)
        for window in windows:
            self._between()
            self.read_window(window, buffer)
            for piece in window:
                for target in rest[piece.grid]:
                    for box in piece.within(target.box):
                        target.deliver(box, piece.found(buffer, box))

    def read_window(self, window: Window, buffer: torch.Tensor) -> None:
        """Read the pieces of a window into its buffer.

        Raises:
            CorruptCheckpointError: a file changed meanwhile.
            OSError: one cannot be read.
        """
        self._files.read_into([one for piece in window for one in self._extents(piece, buffer)])

    def _divided(
        self, targets: Sequence[ReadTarget], ring: Ring | None
    ) -> tuple[list[ReadExtent], list[tuple[Grid, int, int]], dict[Grid, list[ReadTarget]]]:
        """Return what is read directly into its target; and of all else the elements and targets.

        What is wanted twice is read once, by windows.
        """
        of_grid: dict[Grid, list[ReadTarget]] = {}
        for target in targets:
            of_grid.setdefault(target.grid, []).append(target)
        direct: list[ReadExtent] = []
        runs: list[tuple[Grid, int, int]] = []
        rest: dict[Grid, list[ReadTarget]] = {}
        for grid, some in of_grid.items():
            numel = prod(grid.shape)
            whole = grid in self._whole
            spans = sorted(span_of(grid.shape, target.box) for target in some)
            once = all(before[1] <= after[0] for before, after in pairwise(spans))
            left: list[ReadTarget] = []
            for target in some:
                extent: ReadExtent | None = None
                if once and (not whole or len(some) == 1):
                    extent = self._direct(target, ring)
                if extent is None or (whole and extent.length != numel * grid.itemsize):
                    left.append(target)
                else:
                    direct.append(extent)
            if left:
                rest[grid] = left
                needed = [(0, numel)] if whole else _needed(left)
                runs += [(grid, first, stop) for first, stop in needed]
        return direct, runs, rest

    def _direct(self, target: ReadTarget, ring: Ring | None) -> ReadExtent | None:
        """Return how a target is read to where it belongs, None if its bytes lie otherwise."""
        grid = target.grid
        run = run_of(grid.shape, target.box)
        if run is None or not target.takes_bytes():
            return None
        into = target.part(target.box)
        if not into.is_contiguous():
            return None
        first, stop = grid.bytes_of(*run)
        nbytes = stop - first
        sink: Sink = sink_of(into, ring)
        number = self._record_of(first, stop)
        if number is not None:
            sink = CheckedSink(sink, self.ledger, number, first - self.records[number].offset)
        return ReadExtent(first, nbytes, sink)

    def _read_direct(self, extents: Sequence[ReadExtent]) -> None:
        group: list[ReadExtent] = []
        nbytes = 0
        for extent in extents:
            if nbytes + extent.length > _BETWEEN and group:
                self._files.read_into(group)
                self._between()
                group, nbytes = [], 0
            group.append(extent)
            nbytes += extent.length
        if group:
            self._files.read_into(group)

    def _extents(self, piece: WindowPiece, buffer: torch.Tensor) -> Iterator[ReadExtent]:
        """Return how a piece is read into a window's buffer."""
        at, stop = begin, _ = piece.grid.bytes_of(piece.first, piece.stop)

        def into(low: int, high: int) -> HostSink:
            return HostSink(buffer.data_ptr() + piece.at + low - begin, high - low, buffer)

        number = bisect.bisect_right(self._stops, at)
        while number < len(self.records) and self.records[number].offset < stop:
            start = self.records[number].offset
            low, high = max(at, start), min(stop, self._stops[number])
            if at < low:
                yield ReadExtent(at, low - at, into(at, low))
            sink = CheckedSink(into(low, high), self.ledger, number, low - start)
            yield ReadExtent(low, high - low, sink)
            at = high
            number += 1
        if at < stop:
            yield ReadExtent(at, stop - at, into(at, stop))

    def _record_of(self, first: int, stop: int) -> int | None:
        """Return the record in which bytes [first, stop) lie, None if they lie in none."""
        number = bisect.bisect_right(self._stops, first)
        if number == len(self.records) or self.records[number].offset > first:
            return None
        return number if stop <= self._stops[number] else None


def _needed(targets: Sequence[ReadTarget]) -> list[tuple[int, int]]:
    """Return the elements [first, stop) of an array that targets need."""
    return joined(run for target in targets for run in target.grid.runs(target.box, _NEAR))
