"""Moves bytes between the ranks of a group: parts of tensors here, parts of tensors there.

Both directions are the same: a save sends what a rank holds to the rank that writes it, a load
sends what a rank has read to the ranks that hold it. Sender and receiver name the same pieces in
the same order; what a piece is, they know from `boxes.within`. How much moves at once is the
caller's budget: the exchange needs a buffer for what it sends and one for what it receives.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

import torch

from fastserial.config import Config
from fastserial.config.performance import PAGE, PINNED_RING
from fastserial.distributed.comm.group import RankGroup
from fastserial.distributed.layout.boxes import Box, boxes_of_range, span_of
from fastserial.formats.tensors import contiguous_stride
from fastserial.memory.buffers import Buffer, Ring, open_ring
from fastserial.memory.storages import DeviceMemory, memmove

_ALIGN = 16  # bytes of the largest elements
_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")
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


def on_host(view: torch.Tensor) -> bool:
    """Return whether a tensor is in the host's memory."""
    return view.is_cpu


def is_consecutive(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements are consecutive in its storage, in their order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class ExchangeStep(NamedTuple):
    """One exchange that was begun: its two halves, to be called in this order."""

    send: Callable[[], None]
    end: Callable[[], None]


class Exchange:
    """Moves pieces between the ranks of a group, round by round."""

    def __init__(self, comm: RankGroup, config: Config | None = None) -> None:
        """Have nothing under way.

        Args:
            config: the options by which what is sent is copied from devices, as in a save of one
                process: to pinned memory, on streams for copies. None: each copy is waited for.
        """
        self._comm = comm
        self._config = config
        self._ring: Ring | None = None
        self._pinned: Buffer | None = None  # all of the ring
        self._buffers: dict[str, torch.Tensor] = {}
        self.sent_bytes = 0
        self.received_bytes = 0

    def move(
        self,
        sends: Mapping[int, Sequence[torch.Tensor]],
        receives: Mapping[int, Sequence[torch.Tensor]],
    ) -> None:
        """Copy the elements in `sends` to where their receivers say; see `begin`."""
        step = self.begin(sends, receives)
        step.send()
        step.end()

    def begin(
        self,
        sends: Mapping[int, Sequence[torch.Tensor]],
        receives: Mapping[int, Sequence[torch.Tensor]],
    ) -> ExchangeStep:
        """Start to copy what is sent, and to receive. One exchange at a time.

        What is on the host is copied and on its way before this returns. What is on devices must
        stay as it is until `send` returns, which waits for the copies. What is received is complete
        after `end`.

        Args:
            sends: for each rank that gets something from this one, views of any strides, on any
                device.
            receives: for each rank that this one gets something from, where the same elements go,
                in the same order; those of one size may be cut elsewhere. What a rank sends to
                itself is copied, too, cut alike.

        Raises:
            DistributedError: a rank failed, died or was silent for too long.
        """
        here = self._comm.rank
        incoming = self._parts("in", {r: v for r, v in receives.items() if r != here})
        waits = [
            self._comm.receive(rank, buffer)
            for rank, buffer in sorted(incoming.items())
            if buffer.numel()
        ]
        used = {v.device for views in sends.values() for v in views if not on_host(v)}
        ring, pinned = self._stage(used, sends)
        others = {r: v for r, v in sends.items() if r != here or ring is not None}
        outgoing = self._parts("out", others, None if ring is None else pinned)
        pairs = [pair for rank, buffer in outgoing.items() for pair in _pairs(sends[rank], buffer)]
        if ring is not None and pinned is not None:
            ring.join(used)
            away = [(view, place) for view, place in pairs if not on_host(view)]
            pairs = [(view, place) for view, place in pairs if on_host(view)]
            first = pinned.address
            ring.fetch_views(pinned, [(place.data_ptr() - first, view) for view, place in away])
        for view, place in pairs:
            place.copy_(view)

        def send() -> None:
            if ring is not None and pinned is not None:
                ring.arrive(pinned)
            for rank, buffer in sorted(outgoing.items(), key=lambda one: (one[0] - here) % 2**32):
                if buffer.numel() and rank != here:
                    waits.append(self._comm.send(rank, buffer))
                    self.sent_bytes += buffer.numel()

        def end() -> None:
            for wait in waits:
                wait()
            for rank, buffer in incoming.items():
                self.received_bytes += buffer.numel()
                for view, place in _pairs(receives[rank], buffer):
                    view.copy_(place)
            own = receives.get(here, ())
            if here in outgoing:
                for view, place in _pairs(own, outgoing[here]):
                    view.copy_(place)

        if here not in outgoing:
            for source, target in zip(sends.get(here, ()), receives.get(here, ()), strict=True):
                as_integers(target).copy_(as_integers(source))
        if ring is None:
            send()
            return ExchangeStep(lambda: None, end)
        return ExchangeStep(send, end)

    def close(self) -> None:
        """Wait for the copies from devices, and give the pinned memory back. Idempotent."""
        if self._ring is not None:
            self._ring.close()

    def _stage(
        self, used: Set[torch.device], sends: Mapping[int, Sequence[torch.Tensor]]
    ) -> tuple[Ring | None, Buffer | None]:
        """Return pinned memory for all that is sent, if some is on devices and it fits."""
        if not used or self._config is None:
            return None, None
        if self._ring is None:
            self._ring = open_ring(self._config, used, undivided=True)[0]
            if self._ring is None:
                self._config = None  # do not ask again
                return None, None
            self._pinned = self._ring.take()
        fits = sum(_padded(packed(views)) for views in sends.values()) <= PINNED_RING - PAGE
        return (self._ring, self._pinned) if fits and self._ring.join(used) else (None, None)

    def _parts(
        self, name: str, views: Mapping[int, Sequence[torch.Tensor]], pinned: Buffer | None = None
    ) -> dict[int, torch.Tensor]:
        """Return a part of a buffer for each rank's views."""
        sizes = {rank: packed(rows) for rank, rows in views.items()}
        total = sum(map(_padded, sizes.values()))
        if self._ring is not None and pinned is not None:
            buffer = self._ring.host(pinned, total)
        else:
            buffer = self._buffers.get(name, _EMPTY)
            if buffer.numel() < total:
                buffer = self._buffers[name] = torch.empty(total, dtype=torch.uint8, device="cpu")
        parts: dict[int, torch.Tensor] = {}
        at = 0
        for rank, nbytes in sizes.items():
            parts[rank] = buffer[at : at + nbytes]
            at += _padded(nbytes)
        return parts


def _padded(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGN


def packed(parts: Iterable[torch.Tensor]) -> int:
    """Return the bytes of a message of elements: consecutive, each aligned to its size.

    So it does not matter where elements of one size are cut into parts.
    """
    at = 0
    for part in parts:
        if part.numel():
            at += -at % part.element_size() + part.nbytes
    return at


def _pairs(
    parts: Iterable[torch.Tensor], buffer: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield parts that are not empty as integers, each with its place in a message."""
    at = 0
    for part in parts:
        if part.numel():
            at += -at % part.element_size()
            view = as_integers(part)
            yield view, buffer[at : at + part.nbytes].view(view.dtype).view(view.shape)
            at += part.nbytes


class GatheredMemory:
    """A view with strides; its bytes are copied together on request."""

    def __init__(self, view: torch.Tensor, base: int, nbytes: int) -> None:
        """Take a view whose first byte is byte `base` of `nbytes`."""
        self.nbytes = nbytes
        self.device = view.device
        self._view = as_integers(view)
        self._base = base

    def views(self, start: int, length: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield what makes up bytes [start, start + length), whole elements."""
        item, shape = self._view.element_size(), tuple(self._view.shape)
        first, stop = (start - self._base) // item, -(-(start - self._base + length) // item)
        at = 0
        for box in boxes_of_range(shape, first, stop):
            yield at, self._view[box.slices(Box((0,) * len(shape), shape))]
            at += box.numel * item

    def copy_to(self, address: int, start: int, length: int) -> None:
        """Copy bytes [start, start + length) to host memory at `address`."""
        item = self._view.element_size()
        skipped = (start - self._base) % item
        whole = skipped + length + -(skipped + length) % item
        if whole != length or address % item:  # it cuts elements
            out = torch.empty(whole, dtype=torch.uint8, device="cpu")
        else:
            memory = (ctypes.c_uint8 * length).from_address(address)
            out = torch.frombuffer(memory, dtype=torch.uint8)
        for at, piece in self.views(start - skipped, whole):
            out[at : at + piece.nbytes].view(piece.dtype).view(piece.shape).copy_(piece)
        if out.data_ptr() != address:
            memmove(address, out.data_ptr() + skipped, length)


class GatheredDeviceMemory(GatheredMemory, DeviceMemory):
    """The same on a device. Blocks end between elements."""


def gathered_memory(view: torch.Tensor, base: int, nbytes: int) -> GatheredMemory:
    """Return a view of any strides as memory in which its first byte is byte `base`."""
    kind = GatheredMemory if on_host(view) else GatheredDeviceMemory
    return kind(view, base, nbytes)
