"""The bytes of a load: from the file to the ranks that want them.

What only one rank wants, it reads itself, directly into the target where that is possible. What
several want, one of them reads, a window at a time, and sends it on while it reads the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from fastserial.checkpoints.tensor_read import read_tensor_into
from fastserial.distributed.plan.matching import TensorMatch
from fastserial.distributed.plan.owners import ReadShare, Wanted
from fastserial.distributed.ranks.exchange import INTEGERS, Exchange
from fastserial.distributed.ranks.group import Traffic
from fastserial.distributed.reading.part_reader import (
    PartReader,
    ReadTarget,
    Window,
    WindowPiece,
    buffer_for,
    windows_of,
)
from fastserial.distributed.sharding.boxes import Box
from fastserial.distributed.sharding.file_index import FileTensor
from fastserial.distributed.sharding.grid import Grid, grid_of
from fastserial.loading.reader import FastFileReader

_LARGEST_WINDOW = 8 * 1024 * 1024  # bytes; two of them are in memory
_SENT_AT_ONCE = 24 * 1024 * 1024  # bytes by a rank, as many received, and as many to be converted
_PAGE = 4096
_Item = TypeVar("_Item")


def grids_of(leaves: Iterable[tuple[Any, Any]]) -> dict[int, Grid]:
    """Return the grids of the tensors among a file's leaves, by their numbers.

    Tensors that are the same array of the file have the same grid.
    """
    found: dict[int, Grid] = {}
    same: dict[object, Grid | None] = {}
    for _, tensor in leaves:
        if isinstance(tensor, FileTensor) and tensor.problem is None and 0 not in tensor.shape:
            array = tensor.offset, tensor.dtype, tensor.shape, tensor.stride, tensor.pending
            if array not in same:
                same[array] = grid_of(tensor)
            grid = same[array]
            if grid is not None:
                found[tensor.number] = grid
    return found


def targets_of(
    jobs: Sequence[TensorMatch], grids: Mapping[int, Grid]
) -> tuple[list[ReadTarget], list[TensorMatch]]:
    """Return what a rank wants of the file, and what only `read_odd` can read.

    Of two jobs for the same memory it is the later one.
    """
    last: dict[object, ReadTarget] = {}
    odd: list[TensorMatch] = []
    for job in jobs:
        grid = grids.get(job.tensor.number)
        if grid is None:
            odd += [job] if job.held.parts else []
            continue
        for box, view in job.held.parts:
            spot = (view.device, view.data_ptr(), view.shape, view.stride(), view.dtype)
            last.pop(spot, None)
            last[spot] = ReadTarget(grid, grid.box_of(box), view)
    return list(last.values()), odd


def wanted_of(targets: Iterable[ReadTarget]) -> list[tuple[int, Box]]:
    """Return what targets are of: numbers of arrays, and boxes of them."""
    return [(target.grid.tensor.number, target.box) for target in targets]


def read_odd(jobs: Iterable[TensorMatch], reader: FastFileReader) -> None:
    """Read what lies in the file as no part of an array does, on every rank that wants it.

    Raises:
        CorruptCheckpointError: the file changed meanwhile.
        OSError: it cannot be read.
    """
    for tensor, held in jobs:
        for box, view in held.parts:
            meta = torch.empty_strided(
                tensor.shape, tensor.stride, dtype=tensor.dtype, device="meta"
            )
            part = meta[box.slices(Box((0,) * len(tensor.shape), tensor.shape))]
            found = view
            if view.dtype != tensor.dtype:
                found = torch.empty(part.shape, dtype=tensor.dtype, device="cpu")
            read_tensor_into(reader, tensor.offset, part, found, tensor.pending)
            if found is not view:
                view.copy_(found)


class Flow:
    """One load's bytes on one rank."""

    def __init__(self, traffic: Traffic, parts: PartReader, grids: Mapping[int, Grid]) -> None:
        """Prepare.

        Args:
            traffic: to the other ranks.
            parts: reads what this rank reads.
            grids: of every tensor in the file that can be divided, by its number.
        """
        self._traffic, self.parts, self._grids = traffic, parts, grids
        self.exchange = Exchange(traffic)

    def share(
        self, common: Sequence[ReadShare], wanted: Sequence[Wanted], targets: Sequence[ReadTarget]
    ) -> None:
        """Read this rank's part of what several want, send it on, and receive the rest.

        Args:
            common: what several want.
            wanted: by each rank.
            targets: of this rank.

        Raises:
            DistributedError: another rank failed.
            CorruptCheckpointError: the file changed meanwhile.
            OSError: it cannot be read.
        """
        if not common:
            return
        self._traffic.agree()  # here a rank waits as long as the others are alive
        links = {(share.owner, member) for share in common for member in share.members}
        size = _window_size(links, self._traffic.size)
        windows: dict[int, list[Window]] = {}
        for owner in sorted({share.owner for share in common}):
            runs = [(self._grids[s.array], s.first, s.stop) for s in common if s.owner == owner]
            windows[owner] = windows_of(runs, size)
        self._boxes = [_by_array(boxes) for boxes in wanted]
        self._targets = _by_array((t.grid.tensor.number, t) for t in targets)
        with ThreadPoolExecutor(1, "fastserial-window") as pool:
            ahead = _read_ahead(pool, self.parts, windows.get(self._traffic.rank, []))
            for number in range(max(map(len, windows.values()))):
                here = {o: some[number] for o, some in windows.items() if number < len(some)}
                self._round(number, next(ahead, None), here)

    def _round(
        self, number: int, buffer: torch.Tensor | None, windows: Mapping[int, Window]
    ) -> None:
        """Pass on the parts of one window of each owner.

        Args:
            number: of the round.
            buffer: of this rank's window.
            windows: by their owner.
        """
        here = self._traffic.rank
        sends: dict[int, list[torch.Tensor]] = {}
        receives: dict[int, list[torch.Tensor]] = {}
        later: list[tuple[ReadTarget, Box, torch.Tensor]] = []
        if buffer is not None:
            for rank, boxes in enumerate(self._boxes):
                for piece in windows[here] if rank != here else ():
                    for box in boxes.get(piece.grid.tensor.number, ()):
                        for part in piece.within(box):
                            sends.setdefault(rank, []).append(piece.found(buffer, part))
        for owner, window in windows.items():
            for _, target, part in self._parts_in(window) if owner != here else ():
                view = target.part(part)
                if not target.takes_bytes():
                    dtype = INTEGERS[target.grid.tensor.itemsize]
                    view = torch.empty(part.sizes, dtype=dtype, device="cpu")
                    later.append((target, part, view))
                receives.setdefault(owner, []).append(view)
        self.exchange.move(sends, receives)
        for target, part, view in later:
            target.deliver(part, view)
        if buffer is not None:
            for piece, target, part in self._parts_in(windows[here]):
                target.deliver(part, piece.found(buffer, part))

    def _parts_in(self, window: Window) -> Iterator[tuple[WindowPiece, ReadTarget, Box]]:
        """Yield the parts of this rank's targets that a window has, in the order of the sender."""
        for piece in window:
            for target in self._targets.get(piece.grid.tensor.number, ()):
                for part in piece.within(target.box):
                    yield piece, target, part


def _by_array(some: Iterable[tuple[int, _Item]]) -> dict[int, list[_Item]]:
    """Return what is of each array, in its order."""
    found: dict[int, list[_Item]] = {}
    for number, one in some:
        found.setdefault(number, []).append(one)
    return found


def _read_ahead(
    pool: ThreadPoolExecutor, parts: PartReader, windows: Sequence[Window]
) -> Iterator[torch.Tensor]:
    """Yield a buffer with each window, while the next is read; it is good until the next."""
    buffers = [buffer_for(windows[first::2]) for first in range(2)]
    reading: list[Future[None]] = []
    for number, window in enumerate([*windows, None]):
        if window is not None:
            reading.append(pool.submit(parts.read_window, window, buffers[number % 2]))
        if number:
            reading.pop(0).result()
            yield buffers[(number - 1) % 2]


def _window_size(links: set[tuple[int, int]], ranks: int) -> int:
    """Return a window size with which no rank sends or receives too much at once (bytes)."""
    out, into = [0] * ranks, [0] * ranks
    for owner, member in links:
        if owner != member:
            out[owner] += 1
            into[member] += 1
    most = max(1, *out, *into)
    size = min(_LARGEST_WINDOW, _SENT_AT_ONCE // most)
    return max(size - size % _PAGE, _PAGE)
