"""The bytes of a load: from the file to whoever wants them.

What one rank alone wants it reads itself, straight to its place where that is possible. What
several want one of them reads, a window at a time, and sends on, while it reads the next window.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from fastserial.checkpoints.tensor_read import read_tensor_into
from fastserial.distributed.plan.matching import TensorMatch
from fastserial.distributed.plan.owners import NeedMap, ReadShare
from fastserial.distributed.ranks.exchange import Exchange
from fastserial.distributed.ranks.group import Traffic
from fastserial.distributed.reading.grid import Grid, grid_of
from fastserial.distributed.reading.part_reader import PartReader
from fastserial.distributed.reading.windows import (
    ReadTarget,
    Window,
    WindowPart,
    buffer_for,
    by_window,
    deliver,
    found_in,
    landing,
    own_memory,
    windows_of,
)
from fastserial.distributed.sharding.boxes import Box
from fastserial.distributed.sharding.file_index import FileTensor
from fastserial.loading.reader import FastFileReader

__all__ = ["Flow", "grids_of", "need_of", "read_odd", "targets_of"]

_LARGEST_WINDOW = 8 * 1024 * 1024  # bytes; two of them are in memory
_SENT_AT_ONCE = 24 * 1024 * 1024  # bytes by a rank, as many received, and as many to be converted
_PAGE = 4096

Pieces = list[list[WindowPart]]  # of each window


def grids_of(leaves: Iterable[tuple[Any, Any]]) -> dict[int, Grid]:
    """Return the grids of the tensors among a file's leaves, by their numbers."""
    tensors = (leaf for _, leaf in leaves if isinstance(leaf, FileTensor))
    found = {
        tensor.number: grid_of(tensor)
        for tensor in tensors
        if tensor.problem is None and 0 not in tensor.shape
    }
    return {number: grid for number, grid in found.items() if grid is not None}


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


def need_of(targets: Iterable[ReadTarget], file_size: int, block: int) -> NeedMap:
    """Return which blocks of the file targets need."""
    need = NeedMap(file_size, block)
    for target in targets:
        for first, stop in target.grid.runs(target.box, block):
            need.add(first, stop)
    return need


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

    def __init__(
        self,
        traffic: Traffic,
        parts: PartReader,
        targets: Sequence[ReadTarget],
        grids: Mapping[int, Grid],
    ) -> None:
        """Prepare.

        Args:
            traffic: to the other ranks.
            parts: reads what this rank reads.
            targets: what this rank wants.
            grids: of every tensor in the file that can be divided, by its number.
        """
        self._traffic = traffic
        self._parts = parts
        self._targets = targets
        self._grids = grids
        self.exchange = Exchange(traffic)

    def read_own(self, shares: Iterable[ReadShare]) -> None:
        """Read what this rank alone wants.

        Raises:
            CorruptCheckpointError: the file changed meanwhile.
            OSError: it cannot be read.
        """
        here = (self._traffic.rank,)
        runs = [(share.first, share.stop) for share in shares if share.members == here]
        self._parts.read_own(self._targets, runs)

    def share(self, shares: Iterable[ReadShare]) -> None:
        """Read this rank's part of what several want, send it on, and receive the rest.

        Raises:
            DistributedError: another rank failed.
            CorruptCheckpointError: the file changed meanwhile.
            OSError: it cannot be read.
        """
        common = [share for share in shares if len(share.members) > 1]
        if not common:
            return
        self._traffic.agree()  # who waits here, waits as long as the others show signs of life
        here = self._traffic.rank
        links = {(share.owner, member) for share in common for member in share.members}
        size = _window_size(links, self._traffic.size)
        windows = {
            owner: windows_of([(s.first, s.stop) for s in common if s.owner == owner], size)
            for owner in sorted({share.owner for share in common})
        }
        incoming = {
            owner: by_window(self._targets, windows[owner])
            for owner in windows
            if (owner, here) in links
        }
        mine = windows.get(here, [])
        outgoing = self._told(links, incoming, mine)
        with ThreadPoolExecutor(1, "fastserial-window") as pool:
            ahead = _WindowReader(pool, self._parts, mine, outgoing)
            for number in range(max(map(len, windows.values()))):
                self._round(
                    number,
                    ahead.take(number),
                    {rank: rows[number] for rank, rows in outgoing.items() if number < len(rows)},
                    {rank: rows[number] for rank, rows in incoming.items() if number < len(rows)},
                )

    def _told(
        self, links: set[tuple[int, int]], incoming: Mapping[int, Pieces], mine: Sequence[Window]
    ) -> dict[int, Pieces]:
        """Tell each owner what this rank wants of it; return what others want of this one."""
        here = self._traffic.rank
        wishes: dict[int, bytes] = {}
        for owner, rows in incoming.items():
            wanted = {piece.target for pieces in rows for piece in pieces}
            boxes = [
                (target.grid.tensor.number, *target.box)
                for target in self._targets
                if target in wanted
            ]
            wishes[owner] = pickle.dumps(boxes)
        wishes.pop(here, None)
        members = {member for owner, member in links if owner == here != member}
        outgoing: dict[int, Pieces] = {}
        for member, text in self._traffic.swap(wishes, members).items():
            boxes = pickle.loads(text)
            targets = [
                ReadTarget(self._grids[n], Box(offsets, sizes)) for n, offsets, sizes in boxes
            ]
            outgoing[member] = by_window(targets, mine)
        if here in incoming:
            outgoing[here] = incoming[here]
        return outgoing

    def _round(
        self,
        number: int,
        window: torch.Tensor | None,
        outgoing: Mapping[int, list[WindowPart]],
        incoming: Mapping[int, list[WindowPart]],
    ) -> None:
        here = self._traffic.rank
        sends: dict[int, list[torch.Tensor]] = {}
        receives: dict[int, list[torch.Tensor]] = {}
        later: list[tuple[WindowPart, torch.Tensor]] = []
        for rank, pieces in outgoing.items():
            if rank != here and pieces and window is not None:
                sends[rank] = [found_in(window, piece) for piece in pieces]
        for rank, pieces in incoming.items():
            if rank == here or not pieces:
                continue
            views = receives[rank] = []
            for piece in pieces:
                view = landing(piece)
                if view is None:
                    view = own_memory(piece)
                    later.append((piece, view))
                views.append(view)
        self.exchange.move(sends, receives)
        for piece, found in later:
            deliver(piece, found)
        for piece in incoming.get(here, ()):
            if window is not None:
                deliver(piece, found_in(window, piece))


class _WindowReader:
    """Reads a rank's windows, one ahead of those that were taken."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        parts: PartReader,
        windows: Sequence[Window],
        outgoing: Mapping[int, Pieces],
    ) -> None:
        self._pool = pool
        self._parts = parts
        self._windows = windows
        self._outgoing = outgoing
        self._buffers = [buffer_for(windows[place::2]) for place in range(2)]
        self._under_way: Future[None] | None = None
        self._start(0)

    def _start(self, number: int) -> None:
        self._under_way = None
        if number < len(self._windows):
            pieces = [piece for rows in self._outgoing.values() for piece in rows[number]]
            self._under_way = self._pool.submit(
                self._parts.read_window, self._windows[number], pieces, self._buffers[number % 2]
            )

    def take(self, number: int) -> torch.Tensor | None:
        """Return window `number`, None behind the last; it is overwritten two calls later."""
        if self._under_way is None:
            return None
        self._under_way.result()
        self._start(number + 1)
        return self._buffers[number % 2]


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
