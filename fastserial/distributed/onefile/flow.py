"""The bytes of a load: from the file to whoever wants them.

What one rank alone wants it reads itself, straight to its place where that is possible. What
several want one of them reads, a window at a time, and sends on, while it reads the next window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from fastserial.distributed.onefile.part_reader import PartReader, straight_reads
from fastserial.distributed.plan.grid import Grid
from fastserial.distributed.plan.owners import Share
from fastserial.distributed.plan.tiles import (
    Piece,
    Target,
    Window,
    by_window,
    deliver,
    found_in,
    landing,
    own_memory,
    windows_of,
)
from fastserial.distributed.ranks.exchange import Exchange
from fastserial.distributed.ranks.group import Traffic
from fastserial.distributed.sharding.boxes import Box

__all__ = ["Flow"]

_MiB = 1024 * 1024
_LARGEST_WINDOW = 8 * _MiB  # two of them are in memory
_SENT_AT_ONCE = 24 * _MiB  # by a rank, and as many received; as many again to be converted
_PAGE = 4096


class Flow:
    """One load's bytes on one rank."""

    def __init__(
        self,
        traffic: Traffic,
        parts: PartReader,
        targets: Sequence[Target],
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

    def read_own(self, shares: Sequence[Share], file_size: int, block: int) -> None:
        """Read what this rank alone wants.

        Raises:
            CorruptCheckpointError: the file changed meanwhile.
            OSError: it cannot be read.
        """
        mine = [
            (share.first, share.stop) for share in shares if share.members == (self._traffic.rank,)
        ]
        reads, kept, left = straight_reads(self._targets, mine, file_size, block)
        if reads:
            self._parts.read_straight(reads, kept)
        windows = windows_of(left, _LARGEST_WINDOW)
        buffer = _buffer(windows)
        for window, pieces in zip(windows, by_window(self._targets, windows), strict=True):
            self._traffic.alive()
            self._parts.read_window(window, pieces, buffer)
            for piece in pieces:
                deliver(piece, found_in(buffer, piece))

    def share(self, shares: Sequence[Share]) -> None:
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
        outgoing = self._tell_wishes(links, incoming, windows.get(here, []))
        rounds = max(map(len, windows.values()))
        with ThreadPoolExecutor(1, "fastserial-window") as ahead:
            reads = _Ahead(ahead, self._parts, windows.get(here, []), outgoing)
            for number in range(rounds):
                self._round(
                    number,
                    reads.take(number),
                    {rank: rows[number : number + 1] for rank, rows in outgoing.items()},
                    {rank: rows[number : number + 1] for rank, rows in incoming.items()},
                )

    def _tell_wishes(
        self,
        links: set[tuple[int, int]],
        incoming: Mapping[int, list[list[Piece]]],
        windows: Sequence[Window],
    ) -> dict[int, list[list[Piece]]]:
        """Tell each owner what this rank wants of it; return what others want of this one."""
        here = self._traffic.rank
        owners = sorted(owner for owner, member in links if member == here != owner)
        members = sorted(member for owner, member in links if owner == here != member)
        wishes = {owner: self._encode(incoming[owner]) for owner in owners}
        lengths = {member: torch.zeros(1, dtype=torch.int64, device="cpu") for member in members}
        self.exchange.move(
            {owner: [torch.tensor([wishes[owner].numel()], device="cpu")] for owner in owners},
            {member: [length] for member, length in lengths.items()},
        )
        told = {
            m: torch.empty(int(n.item()), dtype=torch.int64, device="cpu")
            for m, n in lengths.items()
        }
        self.exchange.move(
            {owner: [wishes[owner]] for owner in owners},
            {member: [rows] for member, rows in told.items()},
        )
        outgoing = {
            member: by_window(self._decode(rows.tolist()), windows) for member, rows in told.items()
        }
        if here in incoming:
            outgoing[here] = incoming[here]
        return outgoing

    def _encode(self, rows: Sequence[Sequence[Piece]]) -> torch.Tensor:
        """Return the targets of pieces as numbers, in the order of this rank's targets."""
        wanted = {id(piece.target) for pieces in rows for piece in pieces}
        numbers: list[int] = []
        for target in self._targets:
            if id(target) in wanted:
                numbers += (target.grid.tensor.number, *target.box.offsets, *target.box.sizes)
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def _decode(self, rows: Sequence[int]) -> list[Target]:
        targets: list[Target] = []
        at = 0
        while at < len(rows):
            grid = self._grids[rows[at]]
            dims = len(grid.shape)
            middle, end = at + 1 + dims, at + 1 + 2 * dims
            targets.append(Target(grid, Box(tuple(rows[at + 1 : middle]), tuple(rows[middle:end]))))
            at = end
        return targets

    def _round(
        self,
        number: int,
        window: torch.Tensor | None,
        outgoing: Mapping[int, list[list[Piece]]],
        incoming: Mapping[int, list[list[Piece]]],
    ) -> None:
        here = self._traffic.rank
        sends: dict[int, list[torch.Tensor]] = {}
        receives: dict[int, list[torch.Tensor]] = {}
        later: list[tuple[Piece, torch.Tensor]] = []
        for rank, rows in outgoing.items():
            for pieces in rows:
                if rank != here and pieces and window is not None:
                    sends[rank] = [found_in(window, piece) for piece in pieces]
        for rank, rows in incoming.items():
            for pieces in rows:
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
        for pieces in incoming.get(here, ()):
            for piece in pieces:
                if window is not None:
                    deliver(piece, found_in(window, piece))


class _Ahead:
    """Reads a rank's windows, one ahead of those that were taken."""

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        parts: PartReader,
        windows: Sequence[Window],
        outgoing: Mapping[int, list[list[Piece]]],
    ) -> None:
        self._pool = pool
        self._parts = parts
        self._windows = windows
        self._outgoing = outgoing
        self._buffers = [_buffer(windows[place::2]) for place in range(2)]
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


def _buffer(windows: Sequence[Window]) -> torch.Tensor:
    nbytes = max((window.nbytes for window in windows), default=0)
    return torch.empty(nbytes + -nbytes % 16, dtype=torch.uint8, device="cpu")


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
