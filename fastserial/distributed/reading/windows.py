"""Windows of the file, and the pieces of them that somebody wants.

Who reads a window and who gets pieces of it work out the same pieces in the same order, so that
only their bytes travel.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fastserial.checkpoints.tensor_read import resolved
from fastserial.distributed.ranks.exchange import INTEGERS
from fastserial.distributed.reading.grid import Grid
from fastserial.distributed.sharding.boxes import Box
from fastserial.memory.storages import is_plain

__all__ = [
    "ReadTarget",
    "Window",
    "WindowPart",
    "WindowRange",
    "buffer_for",
    "by_window",
    "deliver",
    "found_in",
    "landing",
    "own_memory",
    "spans_of",
    "windows_of",
]

_TAIL = 64  # bytes behind a range that its buffer has: an element may only begin in the range
_ALIGN = 16  # bytes of the largest elements
_MOST_RANGES = 4096  # of a window


@dataclass(slots=True, eq=False)  # thousands are made: frozen ones take longer
class ReadTarget:
    """What a rank wants of a tensor.

    Attributes:
        grid: of the tensor.
        box: of the grid's array.
        view: where its elements go; None for another rank's.
    """

    grid: Grid
    box: Box
    view: torch.Tensor | None = None


class WindowRange(NamedTuple):
    """Bytes [first, stop) of the file, and where a window's buffer has them."""

    first: int
    stop: int
    at: int


class Window(NamedTuple):
    """Ranges of the file that are read together; `nbytes`: of the buffer."""

    ranges: tuple[WindowRange, ...]
    nbytes: int


class WindowPart(NamedTuple):
    """A box of a target whose bytes a window holds.

    Attributes:
        target: of which it is a part.
        box: of the grid's array.
        source: where it begins in the window's buffer (bytes).
    """

    target: ReadTarget
    box: Box
    source: int


def windows_of(runs: Iterable[tuple[int, int]], size: int) -> list[Window]:
    """Cut runs of bytes of the file into windows of up to `size` bytes.

    Args:
        runs: in order, without overlaps. They are cut at multiples of 16 bytes, so not within an
            element that lies at such an address from the beginning of its run on.
    """
    windows: list[Window] = []
    ranges: list[WindowRange] = []
    at = taken = 0

    def end() -> None:
        windows.append(Window(tuple(ranges), at))
        ranges.clear()

    for first, stop in runs:
        while first < stop:
            if size - taken < _ALIGN or len(ranges) == _MOST_RANGES:
                end()
                at = taken = 0
            cut = min(stop, first + (size - taken) // _ALIGN * _ALIGN)
            ranges.append(WindowRange(first, cut, at))
            taken += cut - first
            at += cut - first + _TAIL + -(cut - first) % _ALIGN
            first = cut
    if ranges:
        end()
    return windows


def by_window(targets: Sequence[ReadTarget], windows: Sequence[Window]) -> list[list[WindowPart]]:
    """Return the pieces of the targets that each window holds, in the targets' order."""
    numbered = [(number, one) for number, window in enumerate(windows) for one in window.ranges]
    stops = [one.stop for _, one in numbered]
    found: list[list[WindowPart]] = [[] for _ in windows]
    for target in targets if windows else ():
        begin, end = target.grid.span(target.box)
        place = bisect.bisect_right(stops, begin)
        while place < len(numbered) and numbered[place][1].first < end:
            number, one = numbered[place]
            for box in target.grid.between(target.box, one.first, one.stop):
                source = target.grid.position(box.offsets) - one.first + one.at
                found[number].append(WindowPart(target, box, source))
            place += 1
    return found


def spans_of(pieces: Iterable[WindowPart], window: Window, near: int) -> list[WindowRange]:
    """Return what of the file pieces of one window need, gaps of up to `near` bytes included.

    `at` is where the window's buffer has it; a span never crosses from one of the window's ranges
    to the next: what lies between them is read by others.
    """
    begins = [one.at for one in window.ranges]
    runs = sorted(
        WindowRange(
            begin, end, piece.source + begin - piece.target.grid.position(piece.box.offsets)
        )
        for piece in pieces
        for begin, end in piece.target.grid.runs(piece.box, near)
    )
    found: list[WindowRange] = []
    before = -1
    for run in runs:
        last = found[-1] if found else None
        number = bisect.bisect_right(begins, run.at)  # of the range in which it begins
        if last and number == before and run.first - last.stop <= near:
            found[-1] = WindowRange(last.first, max(last.stop, run.stop), last.at)
        else:
            found.append(run)
        before = number
    return found


def buffer_for(windows: Sequence[Window]) -> torch.Tensor:
    """Return memory for any one of some windows."""
    nbytes = max((window.nbytes for window in windows), default=0)
    return torch.empty(nbytes + -nbytes % _ALIGN, dtype=torch.uint8, device="cpu")


def found_in(window: torch.Tensor, piece: WindowPart) -> torch.Tensor:
    """Return a piece as a window's buffer has it, as integers, in the shape of its box."""
    grid, sizes, at = piece.target.grid, piece.box.sizes, piece.source
    item = grid.tensor.itemsize
    like = INTEGERS[item]
    if at % item == 0:
        return window.view(like).as_strided(sizes, grid.steps, at // item)
    steps = [step * item for step in grid.steps]
    found = window.as_strided((*sizes, item), (*steps, 1), at)
    found = found.clone(memory_format=torch.contiguous_format)  # at an address fit for the type
    return found.view(like).view(sizes)


def landing(piece: WindowPart) -> torch.Tensor | None:
    """Return the part of the target for a piece, in its shape, if the bytes go there as they are.

    Else they go to memory of their own first, and then through `deliver`.
    """
    into = _part(piece)
    return into if _as_they_are(piece, into) else None


def own_memory(piece: WindowPart) -> torch.Tensor:
    """Return new memory for a piece's elements, in the shape of its box."""
    return torch.empty(
        piece.box.sizes, dtype=INTEGERS[piece.target.grid.tensor.itemsize], device="cpu"
    )


def deliver(piece: WindowPart, found: torch.Tensor) -> None:
    """Copy a piece's elements, given as integers, to its target, converted if need be."""
    tensor = piece.target.grid.tensor
    into = _part(piece)
    if not _as_they_are(piece, into):
        into.copy_(resolved(found.view(tensor.dtype), tensor.pending))
    elif into.is_complex():
        into.copy_(found.view(tensor.dtype))
    else:
        into.view(INTEGERS[tensor.itemsize]).copy_(found)


def _part(piece: WindowPart) -> torch.Tensor:
    target = piece.target
    if target.view is None:
        raise ValueError("another rank's target")
    return target.grid.part_of(target.view, target.box, piece.box)


def _as_they_are(piece: WindowPart, into: torch.Tensor) -> bool:
    tensor = piece.target.grid.tensor
    return (
        into.dtype == tensor.dtype
        and is_plain(into)
        and not tensor.pending
        and not into.is_conj()
        and not into.is_neg()
    )
