"""Streams of a device that are for copies alone, and pinned host memory.

Any device for which torch has streams and events will do: CUDA (the name of ROCm, too), XPU and
others. A device is not used before a tensor is on it: then its context exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


_NEEDED = ("Event", "Stream", "current_stream", "device", "stream")


@dataclass(eq=False)
class Pinned:
    """Host memory of `nbytes` bytes at `address` that a device reads and writes by itself.

    `whole` is a tensor of it, one-dimensional uint8, and keeps it. `streams` are those that copied
    from and to it: torch has 32 for each device, and gives them to the program in turn.
    """

    address: int
    nbytes: int
    whole: torch.Tensor
    streams: dict[torch.device, CopyStream] = field(default_factory=dict)


def has_streams(device: torch.device) -> bool:
    """Return whether torch has streams and events for a device."""
    return device.type not in ("cpu", "meta") and all(
        hasattr(_module(device), name) for name in _NEEDED
    )


def copy_stream(device: torch.device) -> CopyStream | None:
    """Return a stream of a device for copies, None if it has none."""
    return CopyStream(device) if has_streams(device) else None


def pin(nbytes: int) -> Pinned:
    """Return new pinned memory.

    Raises:
        RuntimeError: there is none, or no device that would need it.
    """
    import torch

    whole = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return Pinned(whole.data_ptr(), nbytes, whole)


def unpin() -> None:
    """Give pinned memory that no tensor uses back to the system; torch would keep it."""
    import torch

    accelerator: Any = getattr(torch, "accelerator", None)
    if accelerator is None or not accelerator.is_available():
        return
    empty: Any = getattr(accelerator, "empty_host_cache", None)
    empty = empty or getattr(torch._C, "_host_emptyCache", None)  # in older releases
    if empty is not None:
        empty()


def _module(device: torch.device) -> Any:
    import torch

    return getattr(torch, device.type, None)


class CopyStream:
    """A stream of torch's for copies between a device and pinned memory.

    The tensors are one-dimensional uint8, `device` on the device, `host` pinned, or on the device,
    too; both must stay as they are until a later `mark` is reached. Any thread may start copies.

    `stream` alone would make a thread's device the first one again when it is left, and so begin a
    context there, of some hundred MB; `device` leaves a device without a context alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._torch = _module(device)
        self._stream = self._torch.Stream(device)

    def follow(self) -> None:
        """Let later copies wait for the work now queued on the caller's current stream."""
        event = self._torch.Event()
        event.record(self._torch.current_stream(self._device))
        self._stream.wait_event(event)

    def fetch(self, device: torch.Tensor, host: torch.Tensor) -> None:
        """Start a copy from the device."""
        self._copy(device, host)

    def send(self, host: torch.Tensor, device: torch.Tensor) -> None:
        """Start a copy to the device."""
        self._copy(host, device)

    def _copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        with self._torch.device(self._device), self._torch.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> torch.Event:
        """Return the moment when all copies started so far are complete."""
        event: torch.Event = self._torch.Event()
        event.record(self._stream)
        return event
