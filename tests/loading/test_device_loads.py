"""Loads to a device, by a device that completes its copies late and out of order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpus import noise
from support.devices import FakeDevice, Fault, loaded_to, plugged_in
from support.identity import stock
from support.loading import attempt, last_report

import fastserial
from fastserial.loading import reader
from fastserial.memory import devices
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


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint."""
    path = tmp_path_factory.mktemp("files") / "a.pt"
    with stock():
        torch.save(state(), path)
    return path


@pytest.mark.parametrize("case", CASES)
def test_values(file: Path, plug: Plug, case: str) -> None:
    wanted = torch.load(file)
    fastserial.install(**SMALL | CASES[case])
    for seed in range(5):
        device = plug(seed)
        assert same(torch.load(file, map_location=HERE), wanted)
        assert device.faults == []
        assert device.copies >= 5
        assert not any(stream.steps for stream in device._streams)
        assert last_report().transfer == "cpu_async_gpu", last_report()
        assert last_report().fallback is None
        assert last_report().verified == (case == "verified")


def is_loaded_after_the_kernels(device: FakeDevice, path: Path, verify: bool) -> bool:
    """Load into tensors that kernels are still to write: what is queued before comes before."""
    wanted = torch.load(path)
    target = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    for tensor in target.values():
        device.kernel(lambda tensor=tensor: tensor.fill_(1))
    with fastserial.options(**SMALL):
        fastserial.load_into(target, path, verify=verify)
    at_once = same(target, wanted)
    device.finish()
    return at_once and same(target, wanted)


@pytest.fixture
def unsynchronized(plug: Plug, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's streams are not waited for: what the ring does is enough."""
    monkeypatch.setattr(reader, "synchronize", lambda found: None)


@pytest.mark.usefixtures("unsynchronized")
@pytest.mark.parametrize("verify", [True, False])
def test_into_tensors_that_kernels_still_write(file: Path, plug: Plug, verify: bool) -> None:
    for seed in range(10):
        assert is_loaded_after_the_kernels(plug(seed), file, verify)
        assert last_report().transfer == "cpu_async_gpu"


def never_waits(ring: Ring, buffer: Buffer) -> None:
    ring._fences[buffer.index].clear()


def waits_once(ring: Ring, buffer: Buffer, arrive: Any = Ring.arrive) -> None:
    del ring._fences[buffer.index][1:]
    arrive(ring, buffer)


def never_follows(ring: Ring, places: object) -> bool:
    ring._streams[HERE] = devices.copy_stream(HERE)
    return True


BUGS = [("arrive", never_waits), ("arrive", waits_once), ("join", never_follows)]


@pytest.mark.usefixtures("unsynchronized")
@pytest.mark.parametrize(("method", "bug"), [*BUGS, ("settle", lambda ring: None)])
def test_bugs_that_are_put_in_are_found(
    file: Path,
    plug: Plug,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    bug: Any,
) -> None:
    """The negative control: buffers filled again too early, loads that return too early."""
    monkeypatch.setattr(Ring, method, bug)
    found = 0
    for seed in range(60):
        try:
            found += not is_loaded_after_the_kernels(plug(seed), file, False)
        except Fault:
            found += 1
    assert found


# --- which device -------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["cpu:0", HERE])
def test_places(file: Path, plug: Plug, place: Any) -> None:
    """Where the caller says."""

    def outcome() -> tuple[Any, ...]:
        value, _, *others = attempt(lambda: torch.load(file, map_location=place)).seen()
        return value, *others  # but for what may be resized: on a device, all of it may

    with stock():
        wanted = outcome()
    device = plug(1)
    fastserial.install(**SMALL)
    assert outcome() == wanted
    assert bool(device.copies) or place == "cpu:0"  # which torch does not know


@pytest.mark.parametrize("place", [None, b"cpu", lambda storage, place: storage, {"cpu": "cpu"}])
def test_places_that_only_torch_knows(file: Path, plug: Plug, place: Any) -> None:
    with stock():
        wanted = attempt(lambda: torch.load(file, map_location=place)).seen()
    device = plug(1)
    fastserial.install(**SMALL)
    assert attempt(lambda: torch.load(file, map_location=place)).seen() == wanted
    assert not device.copies
