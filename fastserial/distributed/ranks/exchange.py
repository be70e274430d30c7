"""Moves bytes between the ranks of a group: parts of tensors here, parts of tensors there.

Both directions are the same: a save sends what a rank holds to the rank that writes it, a load
sends what a rank has read to the ranks that hold it. Sender and receiver name the same pieces in
the same order; what a piece is, they know from `boxes.within`. How much moves at once is the
caller's budget: the exchange needs a buffer for what it sends and one for what it receives.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from fastserial.distributed.ranks.group import Traffic
from fastserial.distributed.sharding.boxes import Box, boxes_of_range, span_of
from fastserial.formats.tensors import contiguous_stride
from fastserial.memory.storages import Memory, memmove

_ALIGN = 16  # bytes of the largest elements
# By bytes of an element: types that every copy leaves as they are.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor as integers of the same size, which every copy leaves as they are.

    (16 bytes have no integer; complex numbers are copied as they are, too.)
    """
    kind = INTEGERS[tensor.element_size()]
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = tensor.resolve_conj()
    return tensor if tensor.dtype is kind else tensor.resolve_neg().view(kind)


def held_in_range(
    buffer: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], first: int, part: Box
) -> torch.Tensor:
    """Return a part of a row-major tensor in host bytes that begin with its element `first`."""
    flat = buffer.view(dtype)
    start = int(flat.storage_offset()) + span_of(shape, part)[0] - first
    return flat.as_strided(part.sizes, contiguous_stride(shape), start)


def held_in_box(tensor: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """Return a part of the tensor that holds the box."""
    return tensor[part.slices(box)]


def is_consecutive(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements are consecutive in its storage, in their order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


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
        """Copy the elements in `sends` to where their receivers say; see `begin`."""
        self.begin(sends, receives)()

    def begin(
        self,
        sends: Mapping[int, Sequence[torch.Tensor]],
        receives: Mapping[int, Sequence[torch.Tensor]],
    ) -> Callable[[], None]:
        """Start to move; call the result to wait for the end. One exchange at a time.

        What is sent is copied before this returns; what is received is complete at the end.

        Args:
            sends: for each rank that gets something from this one, views of any strides, on any
                device.
            receives: for each rank that this one gets something from, where the same elements go,
                in the same order; those of one size may be cut elsewhere. What a rank sends to
                itself is copied directly, cut alike.

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
            at = _pass(sends[rank], buffer, out=True)
            if at:
                work.append(self._traffic.send(rank, buffer))
            self.sent_bytes += at
        for source, target in zip(sends.get(here, ()), receives.get(here, ()), strict=True):
            as_integers(target).copy_(as_integers(source))

        def end() -> None:
            for wait in work:
                wait()
            for rank, buffer in incoming.items():
                self.received_bytes += _pass(receives[rank], buffer, out=False)

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


def packed(parts: Iterable[torch.Tensor]) -> int:
    """Return the bytes of a message of elements: consecutive, each aligned to its size.

    So it does not matter where elements of one size are cut into parts.
    """
    at = 0
    for part in parts:
        if part.numel():
            at += -at % part.element_size() + part.nbytes
    return at


def _pass(parts: Iterable[torch.Tensor], buffer: torch.Tensor, out: bool) -> int:
    """Copy elements to the buffer, or from there; return how many bytes of it they take."""
    at = 0
    for part in parts:
        if not part.numel():
            continue
        at += -at % part.element_size()
        view = as_integers(part)
        in_buffer = buffer[at : at + part.nbytes].view(view.dtype).view(view.shape)
        if out:
            in_buffer.copy_(view)
        else:
            view.copy_(in_buffer)
        at += part.nbytes
    return at


class GatheredMemory:
    """A view on a device, or with strides; its bytes are copied together on request."""

    def __init__(self, view: torch.Tensor, base: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._view = as_integers(view)
        self._base = base

    def copy_to(self, address: int, start: int, length: int) -> None:
        """Copy bytes [start, start + length) to host memory at `address`."""
        item, shape = self._view.element_size(), tuple(self._view.shape)
        first, stop = (start - self._base) // item, -(-(start - self._base + length) // item)
        skipped = start - self._base - first * item
        if skipped or length != (stop - first) * item or address % item:  # it cuts elements
            out = torch.empty((stop - first) * item, dtype=torch.uint8, device="cpu")
        else:
            memory = (ctypes.c_uint8 * length).from_address(address)
            out = torch.frombuffer(memory, dtype=torch.uint8)
        at = 0
        for box in boxes_of_range(shape, first, stop):
            end = at + box.numel * item
            piece = self._view[box.slices(Box((0,) * len(shape), shape))]
            out[at:end].view(piece.dtype).view(piece.shape).copy_(piece)
            at = end
        if out.data_ptr() != address:
            memmove(address, out.data_ptr() + skipped, length)


class MemorySlice:
    """A memory from a byte on, which may lie before its first."""

    def __init__(self, memory: Memory, start: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._memory, self._start = memory, start

    def copy_to(self, address: int, start: int, length: int) -> None:
        """Copy bytes [start, start + length) to host memory at `address`."""
        self._memory.copy_to(address, self._start + start, length)
