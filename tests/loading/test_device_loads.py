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
from support.devices import FakeDevice, Fault, loaded_to, plugged_in
from support.identity import stock
from support.loading import attempt

import fastserial
from fastserial import CorruptCheckpointError, LoadReport
from fastserial.loading import prefetch, reader
from fastserial.memory.buffers import Buffer, Ring

SMALL: dict[str, Any] = {"block_size": 16384, "queue_depth": 3, "small_file": 0, "cache": "drop"}
CASES = {
    "direct": {"direct": True},
    "cached": {"direct": False},
    "verified": {"verify_on_load": True},
    "one": {"queue_depth": 1, "threads": 1},
}
HERE = torch.device("cpu")  # what the device goes by
ON_HOST = 30_000  # bytes of the storage that is not on it
Plug = Callable[[int], FakeDevice]


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plug]:
    """Make the device of a load: all is on it, but for one storage."""
    device = plugged_in(monkeypatch, FakeDevice())
    loaded_to(monkeypatch, device, lambda storage: storage.nbytes() == ON_HOST)
    yield lambda seed: device.renew(seed, haste=(seed % 10) / 10)
    fastserial.uninstall()


def state() -> dict[str, torch.Tensor]:
    sizes = {"large": 600_000, "small": 1_000, "other": ON_HOST, "empty": 0, "block": 16384 // 4}
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
        assert same(torch.load(files[zipped], map_location=HERE), wanted)
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
    loaded = torch.load(files[False], map_location=HERE)
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
            torch.load(damaged, map_location=HERE)
    damaged.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(Exception, match=r".") as ours:
        torch.load(damaged, map_location=HERE)
    with stock(), pytest.raises(Exception, match=r".") as theirs:
        torch.load(damaged, map_location=HERE)
    assert type(ours.value) is type(theirs.value)


@pytest.mark.parametrize(
    ("word", "taken"),
    [("cpu_gpu", "cpu_gpu"), ("cpu_cached_gpu", "cpu_cached_gpu"), ("auto", "cpu_async_gpu")],
)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_words(files: dict[bool, Path], plug: Plug, zipped: bool, word: str, taken: str) -> None:
    wanted = torch.load(files[zipped])
    device = plug(1)
    fastserial.install(**SMALL, transfer=word)
    assert same(torch.load(files[zipped], map_location=HERE), wanted)
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
        UntypedStorage=lambda nbytes, device: (_ for _ in ()).throw(RuntimeError("no room")),
        **{name: getattr(torch, name) for name in ("cpu", "device", "serialization")},
    )
    monkeypatch.setattr(prefetch, "torch", torch_like)
    fastserial.install(**SMALL)
    assert same(torch.load(files[True], map_location=HERE), wanted)
    assert report().engine == "torch"
    assert "no room" in str(report().fallback)


# --- which device -------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["cpu:0", HERE])
def test_places(files: dict[bool, Path], plug: Plug, place: Any) -> None:
    """Where the caller says."""

    def outcome() -> tuple[Any, ...]:
        value, _, *others = attempt(lambda: torch.load(files[True], map_location=place)).seen()
        return value, *others  # but for what may be resized: on a device, all of it may

    with stock():
        wanted = outcome()
    device = plug(1)
    fastserial.install(**SMALL)
    assert outcome() == wanted
    assert bool(device.copies) or place == "cpu:0"  # which torch does not know


@pytest.mark.parametrize("place", [None, b"cpu", lambda storage, place: storage, {"cpu": "cpu"}])
def test_places_that_only_torch_knows(files: dict[bool, Path], plug: Plug, place: Any) -> None:
    with stock():
        wanted = attempt(lambda: torch.load(files[True], map_location=place)).seen()
    device = plug(1)
    fastserial.install(**SMALL)
    assert attempt(lambda: torch.load(files[True], map_location=place)).seen() == wanted
    assert not device.copies
