"""Loads to a device, by a device that completes its copies late and out of order."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpus import noise
from support.damage import flip
from support.devices import FakeDevice, Fault, plugged_in
from support.identity import stock

import fastserial
from fastserial import CorruptCheckpointError, LoadReport
from fastserial.checkpoints import tensor_read
from fastserial.loading import device_records, legacy_storages, reader, sinks
from fastserial.memory.buffers import Buffer
from fastserial.memory.ring import Ring, pinned_store
from fastserial.patching import load_hooks

SMALL: dict[str, Any] = {"block_size": 16384, "queue_depth": 3, "small_file": 0, "cache": "drop"}
CASES = {
    "direct": {"direct": True},
    "cached": {"direct": False},
    "verified": {"verify_on_load": True},
    "one": {"queue_depth": 1, "threads": 1},
}
Plug = Callable[[int], FakeDevice]


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plug]:
    """Make the device of a load: what `map_location="cpu"` names is on it."""
    device = plugged_in(monkeypatch, FakeDevice())
    for module in (legacy_storages, reader, sinks, tensor_read):
        monkeypatch.setattr(module, "is_on_host", lambda storage: False)
    monkeypatch.setattr(legacy_storages, "has_streams", lambda place: True)
    # nothing of the host's comes for free: a real device's caller is waited for
    monkeypatch.setattr(reader, "synchronize", lambda found: device.finish())
    monkeypatch.setattr(torch.cpu, "current_device", lambda: 0)
    monkeypatch.setattr(
        load_hooks, "_device", lambda load, stock, place: device_records.device_of(place, stock)
    )
    yield lambda seed: device.renew(seed, haste=(seed % 10) / 10)
    fastserial.uninstall()


def state() -> dict[str, torch.Tensor]:
    sizes = {"large": 600_000, "small": 1_000, "other": 30_000, "empty": 0, "block": 16384 // 4}
    values = {name: noise(size) for name, size in sizes.items()}
    return {**values, "view": values["large"][5:50], "byte": torch.arange(7, dtype=torch.uint8)}


def report() -> LoadReport:
    found = fastserial.last_load_report()
    assert found is not None
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A checkpoint in each container, by whether it is a zip."""
    folder = tmp_path_factory.mktemp("files")
    with stock():
        for zipped in (True, False):
            torch.save(state(), folder / f"{zipped}.pt", _use_new_zipfile_serialization=zipped)
    return {zipped: folder / f"{zipped}.pt" for zipped in (True, False)}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("case", CASES)
def test_values(files: dict[bool, Path], plug: Plug, zipped: bool, case: str) -> None:
    wanted = torch.load(files[zipped])
    fastserial.install(**SMALL | CASES[case])
    for seed in range(5):
        device = plug(seed)
        assert same(torch.load(files[zipped], map_location="cpu"), wanted)
        assert device.faults == []
        assert device.copies >= 5
        assert not any(stream.steps for stream in device._streams)
        assert report().transfer == "cpu_async_gpu", report()
        assert report().fallback is None
        assert report().verified == (case == "verified" and zipped)


@pytest.mark.parametrize("verify", [True, False])
def test_into_tensors_that_kernels_still_write(
    files: dict[bool, Path], plug: Plug, monkeypatch: pytest.MonkeyPatch, verify: bool
) -> None:
    """What is queued for the targets when the load begins comes before it."""
    wanted = torch.load(files[True])
    monkeypatch.setattr(reader, "synchronize", lambda found: None)  # not even needed
    for seed in range(5):
        device = plug(seed)
        target = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        for tensor in target.values():
            device.kernel(lambda tensor=tensor: tensor.fill_(1))
        with fastserial.options(**SMALL):
            fastserial.load_into(target, files[True], verify=verify)
        assert same(target, wanted)
        device.finish()
        assert same(target, wanted)
        assert report().transfer == "cpu_async_gpu"


def test_schedules_would_show_it(
    files: dict[bool, Path], plug: Plug, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: buffers that are filled again too early, and a load that returns so."""

    def arrive(ring: Ring, buffer: Buffer) -> None:
        ring._fences[buffer.index].clear()

    wanted = torch.load(files[False])
    monkeypatch.setattr(Ring, "arrive", arrive)
    device = plug(0)  # which is in no haste
    fastserial.install(**SMALL)
    loaded = torch.load(files[False], map_location="cpu")
    assert not same(loaded, wanted)
    with pytest.raises(Fault):
        device.finish()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_damage(tmp_path: Path, files: dict[bool, Path], plug: Plug, zipped: bool) -> None:
    """A flipped bit is found by `verify_on_load`; a file cut short is torch's to complain about."""
    raw = files[zipped].read_bytes()
    plug(1)
    fastserial.install(**SMALL, verify_on_load=True)
    damaged = tmp_path / "damaged.pt"
    if zipped:
        damaged.write_bytes(raw)
        flip(damaged, len(raw) // 2)
        with pytest.raises(CorruptCheckpointError, match="CRC-32"):
            torch.load(damaged, map_location="cpu")
    damaged.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(Exception, match=r".") as ours:
        torch.load(damaged, map_location="cpu")
    with stock(), pytest.raises(Exception, match=r".") as theirs:
        torch.load(damaged, map_location="cpu")
    assert type(ours.value) is type(theirs.value)


def test_memory_is_kept_between_loads(files: dict[bool, Path], plug: Plug) -> None:
    fastserial.free_pinned()
    plug(0)
    fastserial.install(**SMALL)
    held = set()
    for _ in range(3):
        torch.load(files[True], map_location="cpu")
        held.add(pinned_store.held)
    assert len(held) == 1
    assert fastserial.free_pinned() == held.pop()


@pytest.mark.parametrize(
    ("word", "taken"),
    [("cpu_gpu", "cpu_gpu"), ("cpu_cached_gpu", "cpu_cached_gpu"), ("auto", "cpu_async_gpu")],
)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_words(files: dict[bool, Path], plug: Plug, zipped: bool, word: str, taken: str) -> None:
    wanted = torch.load(files[zipped])
    device = plug(1)
    fastserial.install(**SMALL, transfer=word)
    assert same(torch.load(files[zipped], map_location="cpu"), wanted)
    assert report().transfer == taken
    assert bool(device.copies) == (taken != "cpu_gpu")
    if taken == "cpu_cached_gpu":
        assert report().direct_bytes == 0


def test_a_device_without_room(
    files: dict[bool, Path], plug: Plug, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch allocates as it goes, and may have room for it; else the error is torch's."""
    wanted = torch.load(files[True])
    plug(1)
    torch_like = types.SimpleNamespace(
        UntypedStorage=lambda nbytes, device: (_ for _ in ()).throw(RuntimeError("no room"))
    )
    monkeypatch.setattr(device_records, "torch", torch_like)
    monkeypatch.setattr(device_records, "device_of", lambda place, stock: torch.device("cpu"))
    fastserial.install(**SMALL)
    assert same(torch.load(files[True], map_location="cpu"), wanted)
    assert (report().engine, report().fallback) == ("torch", "no room")


# --- which device -------------------------------------------------------------------------------


def order(there: bool = True, text: bytes = b"little") -> Any:
    return types.SimpleNamespace(has_record=lambda name: there, get_record=lambda name: text)


def test_device_of(plug: Plug, monkeypatch: pytest.MonkeyPatch) -> None:
    device_of = device_records.device_of
    cpu = torch.device("cpu", 0)
    assert device_of("cpu", order()) == device_of(torch.device("cpu"), order()) == cpu
    assert device_of("cpu:0", order()) == cpu
    for unknown in (None, {"cuda:0": "cpu"}, lambda storage, place: storage, b"cpu", "no device"):
        assert device_of(unknown, order()) is None
    assert device_of("cpu", order(there=False)) is None  # who knows the order of its bytes
    assert device_of("cpu", order(text=b"big")) is None  # torch swaps them on the host
    monkeypatch.setattr(torch.cpu, "is_available", lambda: False)
    assert device_of("cpu", order()) is None
    monkeypatch.undo()
    assert device_of("cpu", order()) is None  # has no streams


def test_ways_of_others_are_left_alone(plug: Plug, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = list(torch.serialization._package_registry)
    monkeypatch.setattr(torch.serialization, "_package_registry", registry)
    assert device_records.device_of("cpu", order()) is not None
    torch.serialization.register_package(5, lambda storage: None, lambda storage, place: None)
    assert device_records.device_of("cpu", order()) is None
