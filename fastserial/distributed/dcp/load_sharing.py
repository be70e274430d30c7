"""Large pieces that several ranks want: one of them reads each, and sends it on to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from fastserial.distributed.plan.balance import Item, shares
from fastserial.distributed.ranks.group import Traffic
from fastserial.memory.storages import is_plain

__all__ = ["SHARED_FROM", "Turn", "Want", "Wants", "pass_on", "turns"]

SHARED_FROM = 1024 * 1024  # bytes of a piece that is sent on rather than read again
_PIECE = 32 * 1024 * 1024  # bytes on their way to one rank at once


class Want(NamedTuple):
    """A piece of a stored tensor.

    Attributes:
        key, chunk: which part of the checkpoint it is in.
        first, lengths: which part of that.
        dtype: in which it is wanted.
        nbytes: of it.
    """

    key: str
    chunk: tuple[int, ...]
    first: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class Wants(NamedTuple):
    """What a rank of the job wants, and the node it is on."""

    rank: int
    node: str
    pieces: list[Want]


class Turn(NamedTuple):
    """A piece that is read by one rank and sent to others.

    Attributes:
        want: its number among the pieces that this rank wants.
        reader, receivers: ranks.
    """

    want: int
    reader: int
    receivers: tuple[int, ...]


def turns(told: Sequence[Wants]) -> list[list[Turn]]:
    """Return each rank's turns, in an order that is the same on all.

    Each piece is read by one of those who want it, so that all of them read about as much.
    """
    wanting: dict[Want, list[tuple[int, int]]] = {}
    for rank, wants in enumerate(told):
        for number, want in enumerate(wants.pieces):
            wanting.setdefault(want, []).append((rank, number))
    wanted = [
        (want, found)
        for want, found in wanting.items()
        if len({rank for rank, _ in found}) == len(found)  # none twice on one rank
    ]
    items = [Item(want.nbytes, tuple(rank for rank, _ in found)) for want, found in wanted]
    made: list[list[Turn]] = [[] for _ in told]
    for share in shares(items, len(told)):
        found = wanted[share.item][1]
        receivers = tuple(rank for rank, _ in found if rank != share.rank)
        for rank, number in found if receivers else ():
            made[rank].append(Turn(number, share.rank, receivers))
    return made


def pass_on(
    mine: Sequence[Turn], target_of: Callable[[int], torch.Tensor], traffic: Traffic
) -> None:
    """Send what this rank has read, and receive what others have.

    Args:
        target_of: where a piece belongs, by its number.

    Raises:
        DistributedError: a rank failed.
    """
    under_way: list[Callable[[], None]] = []
    for want, reader, receivers in mine:
        for piece in _pieces(target_of(want)):
            straight = is_plain(piece) and piece.is_contiguous() and piece.device.type == "cpu"
            host = piece
            if not straight:
                host = torch.empty(piece.shape, dtype=piece.dtype, device="cpu")
            data = host.view(-1).view(torch.uint8)
            if reader == traffic.rank:
                if not straight:
                    host.copy_(piece)
                started = [traffic.send(rank, data) for rank in receivers]
                _wait_for(under_way)  # the piece before: two are on their way at most
                under_way = started
            else:
                traffic.receive(reader, data)()
                if not straight:
                    piece.copy_(host)
    _wait_for(under_way)


def _wait_for(under_way: Sequence[Callable[[], None]]) -> None:
    for wait in under_way:
        wait()


def _pieces(target: torch.Tensor) -> Iterator[torch.Tensor]:
    """Cut a tensor up; where depends on its shape alone."""
    dim = max(range(target.dim()), key=lambda dim: (target.shape[dim] > _rows(target), -dim))
    rows = max(1, _PIECE // max(1, target.numel() * target.itemsize // target.shape[dim]))
    for first in range(0, target.shape[dim], rows):
        yield target.narrow(dim, first, min(rows, target.shape[dim] - first))


def _rows(target: torch.Tensor) -> int:
    return target.numel() * target.itemsize // _PIECE
