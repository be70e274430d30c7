"""Large pieces that several ranks request: one of them reads each, and sends it to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from fastserial.distributed.plan.balance import Workload, assign
from fastserial.distributed.ranks.group import Traffic
from fastserial.memory.storages import is_plain

__all__ = ["SHARED_FROM", "PieceRequest", "RankRequests", "SharedRead", "pass_on", "shared_reads"]

SHARED_FROM = 1024 * 1024  # bytes; smaller pieces are read by each rank
_MESSAGE = 32 * 1024 * 1024  # bytes of one message


class PieceRequest(NamedTuple):
    """A piece of a stored tensor.

    Attributes:
        key, chunk: of the part of the checkpoint that it is in.
        first, lengths: the elements of that part.
        dtype: of the target.
        nbytes: of it.
    """

    key: str
    chunk: tuple[int, ...]
    first: tuple[int, ...]
    lengths: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


class RankRequests(NamedTuple):
    """The pieces that a rank of the job requests, and the node that it is on."""

    rank: int
    node: str
    pieces: list[PieceRequest]


class SharedRead(NamedTuple):
    """A piece that is read by one rank and sent to others.

    Attributes:
        number: of the piece among those that this rank requests.
        reader, receivers: ranks.
    """

    number: int
    reader: int
    receivers: tuple[int, ...]


def shared_reads(ranks: Sequence[RankRequests]) -> list[list[SharedRead]]:
    """Return each rank's shared reads, in an order that is the same on all.

    Each piece is read by one of the ranks that request it, so that all of them read about as much.
    """
    requesting: dict[PieceRequest, list[tuple[int, int]]] = {}
    for rank, requests in enumerate(ranks):
        for number, piece in enumerate(requests.pieces):
            requesting.setdefault(piece, []).append((rank, number))
    shared = [
        (piece, found)
        for piece, found in requesting.items()
        if len({rank for rank, _ in found}) == len(found)  # none twice on one rank
    ]
    items = [Workload(piece.nbytes, tuple(rank for rank, _ in found)) for piece, found in shared]
    made: list[list[SharedRead]] = [[] for _ in ranks]
    for share in assign(items, len(ranks)):
        found = shared[share.item][1]
        receivers = tuple(rank for rank, _ in found if rank != share.rank)
        for rank, number in found if receivers else ():
            made[rank].append(SharedRead(number, share.rank, receivers))
    return made


def pass_on(
    mine: Sequence[SharedRead], target_of: Callable[[int], torch.Tensor], traffic: Traffic
) -> None:
    """Send what this rank has read, and receive what others have.

    Args:
        target_of: returns the target of a piece, by its number.

    Raises:
        DistributedError: a rank failed.
    """
    pending: list[Callable[[], None]] = []
    for number, reader, receivers in mine:
        for piece in _messages(target_of(number)):
            is_host = is_plain(piece) and piece.is_contiguous() and piece.device.type == "cpu"
            host = piece
            if not is_host:
                host = torch.empty(piece.shape, dtype=piece.dtype, device="cpu")
            data = host.view(-1).view(torch.uint8)
            if reader == traffic.rank:
                if not is_host:
                    host.copy_(piece)
                started = [traffic.send(rank, data) for rank in receivers]
                _wait_for(pending)  # the message before: at most two are pending
                pending = started
            else:
                traffic.receive(reader, data)()
                if not is_host:
                    piece.copy_(host)
    _wait_for(pending)


def _wait_for(pending: Sequence[Callable[[], None]]) -> None:
    for wait in pending:
        wait()


def _messages(target: torch.Tensor) -> Iterator[torch.Tensor]:
    """Cut a tensor into messages; where depends on its shape alone."""
    dim = max(range(target.dim()), key=lambda dim: (target.shape[dim] > _rows(target), -dim))
    rows = max(1, _MESSAGE // max(1, target.numel() * target.itemsize // target.shape[dim]))
    for first in range(0, target.shape[dim], rows):
        yield target.narrow(dim, first, min(rows, target.shape[dim] - first))


def _rows(target: torch.Tensor) -> int:
    return target.numel() * target.itemsize // _MESSAGE
