"""A device for tests: its copies complete late, and out of order.

Its memory is ordinary tensors. A copy moves its bytes at a moment of its own, and notices there
what a real device would suffer from in silence: host memory that was written while the device still
read it, or while the device itself was to write it. What is read of memory too early is poison.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch

from fastserial.checkpoints import tensor_read
from fastserial.loading import reader, session
from fastserial.memory import buffers, devices
from fastserial.memory.devices import Pinned

_POISON = 0xA5


class Fault(AssertionError):
    """Something was read or written at a time when the device had not finished with it."""


@dataclass(eq=False)
class _Step:
    """A copy, or a program's kernel."""

    stream: _Stream
    run: Callable[[], None]
    after: list[_Step]  # these first
    busy: tuple[int, int, bool] | None = None  # host memory, and whether the device writes there
    done: bool = False

    def is_at(self, host: torch.Tensor) -> bool:
        """Return whether it uses some of this memory."""
        if self.busy is None:
            return False
        address, nbytes, _ = self.busy
        first = host.data_ptr()
        return first < address + nbytes and address < first + host.nbytes


@dataclass(eq=False)
class _Stream:
    """A `devices.CopyStream`. Less is promised than by a real one: copies overtake each other.

    Only those that use the same memory as an earlier one, which may be a slot of the device's that
    blocks pass through, come after it.
    """

    device: FakeDevice
    steps: list[_Step] = field(default_factory=list)  # that are not done
    last: _Step | None = None  # what later ones come after

    def add(
        self,
        run: Callable[[], None],
        busy: tuple[int, int, bool] | None = None,
        uses: torch.Tensor | None = None,
    ) -> _Step:
        with self.device.lock:
            after = [self.last] if self.last is not None else []
            if uses is not None:
                after += [step for step in self.steps if step.is_at(uses)]
            step = _Step(self, run, after, busy)
            self.steps.append(step)
        self.device.drift()
        return step

    def follow(self) -> None:
        if threading.get_ident() == self.device.home:  # other threads have streams of their own
            self.last = self.device.caller.last

    def fetch(self, device: torch.Tensor, host: torch.Tensor) -> None:
        self.device.free(host, "fetched to", writes=True)
        host.fill_(_POISON)

        def run() -> None:
            if not bool((host == _POISON).all()):
                self.device.fault("host memory was written that a copy was on its way to")
            host.copy_(device)

        self.add(run, (host.data_ptr(), host.nbytes, True), device)

    def send(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self.device.free(host, "sent", writes=False)
        before = host.clone()

        def run() -> None:
            if not torch.equal(host, before):
                self.device.fault("host memory was written that the device still read")
            device.copy_(host)

        self.add(run, (host.data_ptr(), host.nbytes, False), device)

    def mark(self) -> _Fence:
        with self.device.lock:
            return _Fence(self.device, tuple(self.steps))


@dataclass(frozen=True)
class _Fence:
    device: FakeDevice
    steps: tuple[_Step, ...]

    def synchronize(self) -> None:
        self.device.drift()
        for step in self.steps:
            self.device.complete(step)


class FakeDevice:
    """A device, the streams on it, and its part of the host's memory."""

    def __init__(self, seed: int = 0, haste: float = 0.3) -> None:
        """Complete some copies with each call, the more the greater `haste` (0 to 1) is."""
        self._pinned: weakref.WeakSet[Pinned] = weakref.WeakSet()
        self.lock = threading.RLock()
        self.home = threading.get_ident()
        self.renew(seed, haste)

    def renew(self, seed: int, haste: float) -> FakeDevice:
        """Begin anew: nothing is queued, and chance goes another way."""
        self.faults: list[str] = []
        self.copies = 0
        self._random = Random(seed)
        self._haste = haste
        self._streams: list[_Stream] = []
        for pinned in self._pinned:
            pinned.streams.clear()
        self.caller = self.stream()
        return self

    def stream(self, device: torch.device | None = None) -> _Stream:
        made = _Stream(self)
        self._streams.append(made)
        return made

    def pin(self, nbytes: int) -> Pinned:
        whole = torch.full((nbytes + 4096,), _POISON, dtype=torch.uint8)
        whole = whole[-whole.data_ptr() % 4096 :][:nbytes]
        pinned = Pinned(whole.data_ptr(), nbytes, whole)
        self._pinned.add(pinned)
        return pinned

    def kernel(self, run: Callable[[], Any]) -> None:
        """Queue something on the program's current stream."""
        self.caller.last = self.caller.add(run)

    def reads(self, host: torch.Tensor) -> None:
        """Note that the host reads memory now."""
        self.free(host, "read", writes=False)

    def writes(self, host: torch.Tensor) -> None:
        """Note that the host writes memory now."""
        self.free(host, "written", writes=True)

    def free(self, host: torch.Tensor, what: str, writes: bool) -> None:
        """Find fault with an access, unless all copies are complete that it depends on."""
        with self.lock:
            for stream in self._streams:
                for step in stream.steps:
                    if step.busy is not None and (writes or step.busy[2]) and step.is_at(host):
                        self.fault(f"memory was {what} before a copy was complete")

    def fault(self, what: str) -> None:
        self.faults.append(what)
        raise Fault(what)

    def drift(self) -> None:
        """Let some time pass: anything may get on that has nothing to wait for."""
        with self.lock:
            while self._random.random() < self._haste:
                steps = [step for one in self._streams for step in one.steps]
                if not steps:
                    return
                self.complete(self._random.choice(steps))

    def complete(self, step: _Step) -> None:
        """Run a step, and what must come before it."""
        with self.lock:
            if step.done:
                return
            for earlier in step.after:
                self.complete(earlier)
            step.done = True
            step.stream.steps.remove(step)
            self.copies += step.busy is not None
            step.run()

    def finish(self) -> None:
        """Run all that is queued."""
        with self.lock:
            for stream in self._streams:
                for step in list(stream.steps):
                    self.complete(step)


def plugged_in(patch: pytest.MonkeyPatch, device: FakeDevice) -> FakeDevice:
    """Let fastserial take tensors of the host that it is told are on a device for the device's."""
    patch.setattr(devices, "has_streams", lambda place: True)
    patch.setattr(devices, "copy_stream", device.stream)
    patch.setattr(devices, "pin", device.pin)
    patch.setattr(devices, "unpin", lambda: None)
    patch.setattr(buffers.pinned_store, "_kept", [])
    patch.setattr(
        buffers.pinned_store, "_all", weakref.WeakSet()
    )  # not what a traceback still holds
    return device


def loaded_to(
    patch: pytest.MonkeyPatch,
    device: FakeDevice,
    is_on_host: Callable[[torch.UntypedStorage], bool],
) -> None:
    """Let loads take the host's tensors for the device's, but for storages that are on the host."""
    for module in (reader, tensor_read):
        patch.setattr(module, "is_on_host", is_on_host)
    patch.setattr(session, "has_streams", lambda place: True)
    # nothing of the host's comes for free: a real device's caller is waited for
    patch.setattr(reader, "synchronize", lambda found: device.finish())
    patch.setattr(torch.cpu, "current_device", lambda: 0)
    patch.setattr(session, "_HOST", "host")
