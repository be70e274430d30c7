"""Moves bytes between the ranks of a group: views of tensors here, views of tensors there.

Both directions are the same: a save sends what a rank holds to the rank that writes it, a load
sends what a rank has read to the ranks that hold it. Sender and receiver name the same pieces in
the same order; what a piece is, they know from `boxes.overlaps`. How much moves at once is the
caller's budget: the exchange needs a buffer for what it sends and one for what it receives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from fastserial.distributed.boxes import Box, Overlap
from fastserial.distributed.group import Traffic

__all__ = ["Exchange", "as_integers", "packed", "view_in_range"]

_ALIGN = 16  # bytes of the largest elements
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor as integers of the same size, which every copy leaves as they are.

    (16 bytes have no integer; complex numbers are copied as they are, too.)
    """
    kind = _INTEGERS[tensor.element_size()]
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = tensor.resolve_conj()
    return tensor if tensor.dtype is kind else tensor.resolve_neg().view(kind)


def view_in_range(buffer: torch.Tensor, overlap: Overlap) -> torch.Tensor:
    """Return the view of an overlap in the one-dimensional tensor that holds the flat range."""
    at, row, part = overlap
    whole = buffer.narrow(0, at, row.numel).view(row.sizes)
    return whole[part.slices(row)]


def view_in_box(tensor: torch.Tensor, box: Box, overlap: Overlap) -> torch.Tensor:
    """Return the view of an overlap in the tensor that holds the box."""
    return tensor[overlap.part.slices(box)]


class Exchange:
    """Moves pieces between the ranks of a group, round by round."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._buffers: dict[str, torch.Tensor] = {}
        self.sent_bytes = 0
        self.received_bytes = 0

    def move(
        self,
        sends: Mapping[int, Sequence[torch.Tensor]],
        receives: Mapping[int, Sequence[torch.Tensor]],
    ) -> None:
        """Copy the views in `sends` into the views that their receivers name; see `begin`."""
        self.begin(sends, receives)()

    def begin(
        self,
        sends: Mapping[int, Sequence[torch.Tensor]],
        receives: Mapping[int, Sequence[torch.Tensor]],
    ) -> Callable[[], None]:
        """Begin to move; call the result to wait until all has come. One at a time.

        What is sent is copied before this returns; what comes is in its views at the end.

        Args:
            sends: for each rank that gets something from this one, views of any strides, on any
                device.
            receives: for each rank that this one gets something from, views of the same elements
                in the same order; those of one size may be cut elsewhere. What a rank sends to
                itself goes without a detour, in views of the same shapes.

        Raises:
            DistributedError: a rank failed, died or was silent for too long.
        """
        here = self._traffic.rank
        incoming = self._parts("in", {r: v for r, v in receives.items() if r != here})
        work = [
            self._traffic.receive(rank, buffer)
            for rank, buffer in sorted(incoming.items())
            if buffer.numel()
        ]
        outgoing = self._parts("out", {r: v for r, v in sends.items() if r != here})
        for rank, buffer in sorted(outgoing.items(), key=lambda item: (item[0] - here) % 2**32):
            at = 0
            for view in sends[rank]:
                at = _pass(view, buffer, at, out=True)
            if at:
                work.append(self._traffic.send(rank, buffer))
            self.sent_bytes += at
        for source, target in zip(sends.get(here, ()), receives.get(here, ()), strict=True):
            as_integers(target).copy_(as_integers(source))

        def end() -> None:
            for wait in work:
                wait()
            for rank, buffer in incoming.items():
                at = 0
                for view in receives[rank]:
                    at = _pass(view, buffer, at, out=False)
                self.received_bytes += at

        return end

    def _parts(
        self, name: str, views: Mapping[int, Sequence[torch.Tensor]]
    ) -> dict[int, torch.Tensor]:
        """Return a part of a buffer for each rank's views."""
        sizes = {rank: packed(rows) for rank, rows in views.items()}
        total = sum(nbytes + -nbytes % _ALIGN for nbytes in sizes.values())
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < total:
            buffer = self._buffers[name] = torch.empty(total, dtype=torch.uint8, device="cpu")
        parts: dict[int, torch.Tensor] = {}
        at = 0
        for rank, nbytes in sizes.items():
            parts[rank] = buffer[at : at + nbytes]
            at += nbytes + -nbytes % _ALIGN
        return parts


def packed(views: Sequence[torch.Tensor]) -> int:
    """Return what views take on the way: one behind the other, each aligned to its elements.

    So it does not matter where elements of one size are cut into views.
    """
    at = 0
    for view in views:
        if view.numel():
            item = view.element_size()
            at += -at % item + view.numel() * item
    return at


def _pass(view: torch.Tensor, buffer: torch.Tensor, at: int, out: bool) -> int:
    """Copy between a view and the buffer's byte `at`; return where the next one begins."""
    nbytes = view.numel() * view.element_size()
    if nbytes:
        at += -at % view.element_size()
        view = as_integers(view)
        there = buffer[at : at + nbytes].view(view.dtype).view(view.shape)
        if out:
            there.copy_(view)
        else:
            view.copy_(there)
    return at + nbytes
