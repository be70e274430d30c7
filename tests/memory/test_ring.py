"""The ring of pinned buffers: thousands of orders in which copies and threads may get on.

Each schedule moves blocks from a device to a file, or from a file to a device, in one thread that
plays all parts: which of them gets on next is drawn by chance. `FakeDevice` finds fault with what
is read or written too early. The same schedules find the bugs that are put in.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable
from random import Random

import pytest
import torch
from support.devices import FakeDevice, Fault, plugged_in

import fastserial
from fastserial.config.performance import PINNED_MOST, PINNED_RING
from fastserial.errors import EngineError, StorageChangedError
from fastserial.memory import buffers as ring_module
from fastserial.memory import devices
from fastserial.memory.buffers import Buffer, PinnedStore, Ring
from fastserial.memory.storages import StorageMemory

BLOCK = 4096
SCHEDULES = 600  # each way
SEEDED = 40  # schedules within which a bug that is put in must be found
PLACE = torch.device("cpu")  # where the fake device's memory is


def noise(random: Random, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(random.randbytes(nbytes)), dtype=torch.uint8)


@pytest.fixture
def seeded(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], FakeDevice]:
    """Make the device of a schedule."""
    device = plugged_in(monkeypatch, FakeDevice())
    return lambda seed: device.renew(seed, haste=(seed % 10) / 10)


class Save:
    """Blocks from a device to a file: fetched in order, read and given back in any."""

    def __init__(self, device: FakeDevice, make: Callable[..., Ring], seed: int) -> None:
        self.device, self.random = device, Random(seed)
        self.ring = make(device.pin(3 * BLOCK), 3, BLOCK)
        count = self.random.randint(1, 9)
        self.source = torch.zeros(count * BLOCK, dtype=torch.uint8)
        self.wanted = noise(self.random, count * BLOCK)
        self.memory = StorageMemory(self.source.untyped_storage())
        self.file = torch.zeros_like(self.source)
        self.todo = list(range(count))
        self.fetched: list[tuple[int, Buffer]] = []
        self.read: list[Buffer] = []

    def run(self) -> None:
        # the program's last kernel writes the values; later ones come when all is saved
        self.device.kernel(lambda: self.source.copy_(self.wanted))
        self.ring.join([PLACE])
        while self.todo or self.fetched or self.read:
            self.random.choice((self.fetch, self.write, self.give))()
        self.device.kernel(lambda: self.source.zero_())
        self.device.finish()
        if not torch.equal(self.file, self.wanted):
            raise Fault("the file holds something else")

    def fetch(self) -> None:
        if not self.todo or not self.ring.free:
            return
        block = self.todo.pop(0)
        buffer = self.ring.take()
        cut = self.random.randint(1, BLOCK - 1)
        first = block * BLOCK
        pieces = [(0, self.memory, first, cut), (cut, self.memory, first + cut, BLOCK - cut)]
        self.ring.fetch(buffer, pieces)
        self.fetched.append((block, buffer))

    def write(self) -> None:
        if self.fetched:
            block, buffer = self.fetched.pop(self.random.randrange(len(self.fetched)))
            self.ring.arrive(buffer)
            host = self.ring._host(buffer.address, BLOCK)
            self.device.reads(host)
            self.file[block * BLOCK : (block + 1) * BLOCK] = host
            self.read.append(buffer)

    def give(self) -> None:
        if self.read:
            self.ring.give(self.read.pop(self.random.randrange(len(self.read))))


class Load:
    """Blocks from a file to a device: read to a buffer in any order, sent, and given back."""

    def __init__(self, device: FakeDevice, make: Callable[..., Ring], seed: int) -> None:
        self.device, self.random = device, Random(seed)
        self.ring = make(device.pin(3 * BLOCK), 3, BLOCK)
        count = self.random.randint(1, 9)
        self.file = noise(self.random, count * BLOCK)
        self.target = torch.zeros(count * BLOCK, dtype=torch.uint8)
        self.todo = list(range(count))
        self.reading: list[tuple[int, Buffer]] = []

    def run(self) -> None:
        # the target's memory was another tensor's a moment ago, which a kernel still writes
        self.device.kernel(lambda: self.target.fill_(1))
        self.ring.join([PLACE])
        while self.todo or self.reading:
            self.random.choice((self.take, self.send))()
        self.ring.settle()
        if not torch.equal(self.target, self.file):
            raise Fault("the device holds something else")
        self.device.finish()
        if not torch.equal(self.target, self.file):
            raise Fault("an earlier kernel wrote over what was loaded")

    def take(self) -> None:
        if self.todo and self.ring.free:
            self.reading.append((self.todo.pop(0), self.ring.take()))

    def send(self) -> None:
        if not self.reading:
            return
        block, buffer = self.reading.pop(self.random.randrange(len(self.reading)))
        host = self.ring._host(buffer.address, BLOCK)
        self.device.writes(host)
        host.copy_(self.file[block * BLOCK : (block + 1) * BLOCK])
        cut = self.random.randint(1, BLOCK - 1)
        first = block * BLOCK
        for start, stop in ((0, cut), (cut, BLOCK)):
            target = self.target[first + start : first + stop]
            self.ring.send(buffer.address + start, stop - start, target)
        self.ring.give(buffer)


WAYS = [Save, Load]


@pytest.mark.parametrize("way", WAYS)
def test_any_schedule(way: type[Save | Load], seeded: Callable[[int], FakeDevice]) -> None:
    copies = 0
    for seed in range(SCHEDULES):
        device = seeded(seed)
        way(device, Ring, seed).run()
        copies += device.copies
    assert copies > 4 * SCHEDULES


class NeverWaits(Ring):
    """A buffer counts as arrived as soon as its copies are started."""

    def arrive(self, buffer: Buffer) -> None:
        self._fences[buffer.index].clear()


class WaitsOnce(Ring):
    """Of several copies to or from a buffer only the first is waited for."""

    def arrive(self, buffer: Buffer) -> None:
        del self._fences[buffer.index][1:]
        super().arrive(buffer)


class NeverFollows(Ring):
    """Copies do not wait for what the program has queued."""

    def join(self, places: object) -> bool:
        self._streams[PLACE] = devices.copy_stream(PLACE)
        return True


class NeverSettles(Ring):
    """A load returns before its last copies are complete."""

    def settle(self) -> None:
        pass


@pytest.mark.parametrize(
    ("way", "bug"),
    [
        (Save, NeverWaits),
        (Save, NeverFollows),
        (Load, NeverWaits),
        (Load, WaitsOnce),
        (Load, NeverFollows),
        (Load, NeverSettles),
    ],
)
def test_schedules_find_bugs(
    way: type[Save | Load], bug: type[Ring], seeded: Callable[[int], FakeDevice]
) -> None:
    """The negative control: with a guard off, the same schedules fail."""
    found = 0
    for seed in range(SEEDED):
        try:
            way(seeded(seed), bug, seed).run()
        except Fault:
            found += 1
    assert found >= SEEDED // 10, found


# --- what the ring is made of -------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return plugged_in(monkeypatch, FakeDevice())


def test_buffers_are_aligned(device: FakeDevice) -> None:
    pinned = device.pin(5 * BLOCK)
    pinned.address += 512  # the system may pin memory that begins anywhere
    ring = Ring(pinned, 8, BLOCK)
    assert len(ring.buffers) == ring.free == 4
    assert all(buffer.address % 4096 == 0 for buffer in ring.buffers)
    inside, outside = ring.buffers[1].address, ring.buffers[3].address + 1
    assert ring.holds(inside, BLOCK)
    assert not ring.holds(outside, BLOCK)
    taken = [ring.take() for _ in range(4)]
    with pytest.raises(EngineError):
        ring.take()
    for buffer in taken:
        ring.give(buffer)
    assert ring.take() is taken[0]  # the one that was given back first
    ring.close()


def test_memory_is_kept_and_freed(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PinnedStore()
    monkeypatch.setattr(ring_module, "pinned_store", store)
    assert store.free() == 0
    one, two = store.take(), store.take()
    assert one is not None
    assert two is not None
    assert store.take() is None  # no more than this for all saves and loads together
    assert PINNED_MOST == 2 * PINNED_RING
    ring = Ring(one, 4, 1 << 20)
    ring.close()
    ring.close()
    assert store.take() is one
    store.give(one)
    store.give(two)
    del one, two, ring
    assert fastserial.free_pinned() == PINNED_MOST
    assert store.take() is not None
    assert store.take() is not None


def test_memory_of_a_lost_ring_does_not_count(device: FakeDevice) -> None:
    store = PinnedStore()
    for _ in range(5):
        pinned = store.take()
        assert pinned is not None
        ring = Ring(pinned, 2, 1 << 20)
        del pinned, ring  # as when an interrupt skips `close`
    assert len(store._all) <= 1


def test_a_block_keeps_its_memory(device: FakeDevice) -> None:
    """A ring that nobody closed is gone; a thread may still be writing from it."""
    pinned = device.pin(2 * BLOCK)
    whole = weakref.ref(pinned)
    ring = Ring(pinned, 2, BLOCK)
    buffer = ring.take()
    del pinned, ring
    assert whole() is not None
    del buffer
    assert whole() is None


def test_a_forked_child_begins_anew(device: FakeDevice) -> None:
    ring_module.pinned_store.give(device.pin(BLOCK))
    child = os.fork()
    if child == 0:
        os._exit(len(ring_module.pinned_store._kept))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(ring_module.pinned_store._kept) == 1


def test_a_storage_resized_on_the_way(device: FakeDevice) -> None:
    tensor = torch.zeros(BLOCK, dtype=torch.uint8)
    memory = StorageMemory(tensor.untyped_storage())
    ring = Ring(device.pin(BLOCK), 1, BLOCK)
    ring.join([PLACE])
    tensor.untyped_storage().resize_(0)
    with pytest.raises(StorageChangedError):
        ring.fetch(ring.take(), [(0, memory, 0, BLOCK)])
    ring.close()


# --- torch's streams ----------------------------------------------------------------------------


@pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "wait_event"), reason="torch.cpu.Stream has no wait_event here"
)
def test_calls_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that are made of a device's module, on torch's stand-ins for the host."""
    monkeypatch.setattr(torch.cpu, "device", contextlib.nullcontext, raising=False)
    stream = devices.CopyStream(PLACE)
    stream.follow()
    random = Random(0)
    here, there, back = noise(random, 100), noise(random, 100), noise(random, 100)
    stream.send(here, there)
    stream.fetch(there, back)
    stream.mark().synchronize()
    assert torch.equal(here, back)
    assert devices.copy_stream(PLACE) is None  # the host needs none
    assert not devices.has_streams(torch.device("meta"))
    assert all(hasattr(torch.cuda, name) for name in devices._NEEDED)
    assert all(hasattr(torch.xpu, name) for name in devices._NEEDED)
    devices.unpin()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device to pin for")
def test_nothing_to_pin_for() -> None:
    with pytest.raises(RuntimeError):
        devices.pin(BLOCK)
