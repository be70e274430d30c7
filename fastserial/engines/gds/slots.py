"""Memory of devices that blocks pass through past the host, kept between saves."""

from __future__ import annotations

import ctypes
import os
import threading
from typing import TYPE_CHECKING

from fastserial.config.performance import PAGE, PINNED_RING
from fastserial.engines.gds.driver import Call, DirectDriver, Region
from fastserial.memory import devices
from fastserial.memory import ring as rings

if TYPE_CHECKING:
    import torch

    from fastserial.memory.devices import CopyStream

__all__ = ["Slots", "give_slots", "take_slots"]

_CALLS = PINNED_RING // PAGE  # as many slots as there can be


class Slots:
    """Memory of a device, and the parameters of the calls for it, one for each slot."""

    def __init__(self, driver: DirectDriver, device: torch.device) -> None:
        """Allocate and register.

        Raises:
            RuntimeError: the device or the host has not enough memory.
        """
        import torch

        whole = torch.empty(PINNED_RING + PAGE, dtype=torch.uint8, device=device)
        before = -whole.data_ptr() % PAGE
        self.driver, self.device = driver, device
        self.whole = whole[before : before + PINNED_RING]
        # NVIDIA wants what an asynchronous write reports in pinned memory
        self._pinned = devices.pin(_CALLS * ctypes.sizeof(Call))
        self.calls = (Call * _CALLS).from_address(self._pinned.address)
        address = self.whole.data_ptr()
        with driver.on(device):
            registered = driver.register(address, PINNED_RING)
        self.region = Region(device, address, registered)
        self.streams: list[CopyStream] = []  # kept: torch has 32, the program's among them

    def provide_streams(self, count: int) -> None:
        """Get ready for `stream`: slots in turn are copied on `count` streams, or on more."""
        while len(self.streams) < count:
            stream = devices.copy_stream(self.device)
            if stream is None:
                return
            self.streams.append(stream)

    def stream(self, slot: int) -> CopyStream:
        """Return the stream on which a slot is copied to and from."""
        return self.streams[slot % len(self.streams)]

    def release(self) -> None:
        """Let go of the memory; nothing uses it."""
        if self.region.registered:
            with self.driver.on(self.device):
                self.driver.release(self.region.address)


_lock = threading.RLock()  # a signal handler may save, too
_kept: list[Slots] = []  # for the next save or load
_parents: list[Slots] = []


def take_slots(driver: DirectDriver, device: torch.device) -> Slots:
    """Return slots that nobody uses.

    Raises:
        RuntimeError: the device or the host has not enough memory.
    """
    with _lock:
        for slots in _kept:
            if slots.device == device and slots.driver is driver:
                _kept.remove(slots)
                return slots
    return Slots(driver, device)


def give_slots(slots: Slots) -> None:
    """Take slots back that nothing uses any more."""
    with _lock:
        _kept.append(slots)


def _free_slots() -> None:
    with _lock:
        while _kept:
            _kept.pop().release()


def _forget_slots() -> None:
    """Begin anew in a forked child: the device's memory is the parent's."""
    _parents.extend(_kept)
    _kept.clear()


rings.freed_with_it.append(_free_slots)
os.register_at_fork(after_in_child=_forget_slots)
