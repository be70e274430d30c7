"""The ring of pinned buffers; the order of its copies: `test_device_transfers`."""

from __future__ import annotations

import contextlib

import pytest
import torch
from support.corpus import noise
from support.devices import FakeDevice, plugged_in

import fastserial
from fastserial.config.performance import PINNED_MOST, PINNED_RING
from fastserial.errors import EngineError, StorageChangedError
from fastserial.memory import buffers as ring_module
from fastserial.memory import devices
from fastserial.memory.buffers import PinnedStore, Ring
from fastserial.memory.storages import StorageMemory

BLOCK = 4096
PLACE = torch.device("cpu")  # where the fake device's memory is


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
    here, there, back = noise(100), noise(100), noise(100)
    stream.send(here, there)
    stream.fetch(there, back)
    stream.mark().synchronize()
    assert torch.equal(here, back)
    assert devices.copy_stream(PLACE) is None  # the host needs none
    assert not devices.has_streams(torch.device("meta"))
    assert all(hasattr(torch.cuda, name) for name in devices._NEEDED)
    assert all(hasattr(torch.xpu, name) for name in devices._NEEDED)
    devices.unpin()
