"""Saves and loads past the host, by a cuFile for tests over a device whose copies come late.

`support.cufile` finds fault with parameters and memory that change before their time; each test
here looks for its faults, and the seeded bugs at the end must be found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpus import noise
from support.cufile import FakeCuFile, cufile_on
from support.devices import FakeDevice, loaded_to
from support.identity import last_save, stock
from support.loading import last_report

import fastserial
from fastserial.memory import buffers as ring_module
from fastserial.memory import storages

WORDS = ("gds", "gpu_async", "gpu_batch")
BLOCK = 16384
SMALL: dict[str, Any] = {
    "block_size": BLOCK, "queue_depth": 3, "threads": 3, "small_file": 0, "durable": False,
    "direct": True, "cache": "drop",
}  # fmt: skip
ON_HOST = 30_000  # bytes of the storage that is not on the device
HERE = torch.device("cpu")  # what the device goes by
SEEDS = range(3)
Plug = Callable[[int], FakeCuFile]


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plug]:
    """Make a device, cuFile with it, and all storages but one on it."""
    device = FakeDevice()
    fake = cufile_on(monkeypatch, device)

    def is_on_host(storage: torch.UntypedStorage) -> bool:
        return storage.nbytes() in (0, ON_HOST)

    loaded_to(monkeypatch, device, is_on_host)
    monkeypatch.setattr(storages, "is_on_host", is_on_host)
    monkeypatch.setattr(storages, "device_types", lambda storages: {"fake"})

    def make(seed: int) -> FakeCuFile:
        device.renew(seed, haste=(seed % 10) / 10)
        return fake.renew()

    yield make
    fastserial.uninstall()
    fastserial.free_pinned()
    assert not fake.files, "a handle was not given back"
    assert not fake.registered, "memory is still registered"


def state() -> dict[str, torch.Tensor]:
    sizes = {"large": 300_000, "small": 1_000, "host": ON_HOST, "empty": 0, "next": 5 * BLOCK}
    values = {name: noise(size) for name, size in sizes.items()}
    return {**values, "view": values["large"][5:50], "byte": torch.arange(7, dtype=torch.uint8)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def stocks(value: Any, path: Path, zipped: bool = True) -> bytes:
    with stock():
        torch.save(value, path, _use_new_zipfile_serialization=zipped)
    return path.read_bytes()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("word", WORDS)
def test_saves(tmp_path: Path, plug: Plug, word: str, zipped: bool) -> None:
    """Stock's bytes, most of which did not pass through the host."""
    value, path = state(), tmp_path / "a.pt"
    wanted = stocks(value, path, zipped)
    for seed in SEEDS:
        fake = plug(seed)
        fastserial.install(**SMALL, transfer=word)
        torch.save(value, path, _use_new_zipfile_serialization=zipped)
        assert path.read_bytes() == wanted, seed
        assert fake.device.faults == []
        assert fake.moved >= 300_000, last_save()
        assert (last_save().transfer, last_save().direct) == ("gds", True)
        asked = "asked for" if word == "gds" else f"{word} is taken as gds"
        assert last_save().transfer_why == f"{asked}: cuFile 1.17"


@pytest.mark.parametrize("word", WORDS)
def test_loads(tmp_path: Path, plug: Plug, word: str) -> None:
    value, path = state(), tmp_path / "a.pt"
    stocks(value, path)
    for seed in SEEDS:
        fake = plug(seed)
        fastserial.install(**SMALL, transfer=word)
        assert same(torch.load(path, map_location=HERE), value), seed
        assert fake.device.faults == []
        assert fake.moved >= 300_000
        assert not any(stream.steps for stream in fake.device._streams)
        assert (last_report().transfer, last_report().fallback) == ("gds", None)
        assert last_report().direct_bytes >= fake.moved


def test_after_the_programs_kernels(tmp_path: Path, plug: Plug) -> None:
    """What is queued for tensors when a save or a load begins comes before it."""
    wanted, path = state(), tmp_path / "a.pt"
    for seed in SEEDS:
        device = plug(seed).device
        value = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        on_device = {name for name in value if value[name].nbytes not in (0, ON_HOST)}
        value["host"] = wanted["host"]
        for name in on_device:
            device.kernel(partial(value[name].copy_, wanted[name]))
        fastserial.install(**SMALL, transfer="gds")
        torch.save(value, path)
        for name in on_device:
            device.kernel(value[name].zero_)
        device.finish()
        assert same(torch.load(path), wanted)
        target = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        for name in on_device:
            device.kernel(partial(target[name].fill_, 1))
        fastserial.load_into(target, path, verify=False)
        assert same(target, wanted)
        device.finish()
        assert same(target, wanted)
        assert last_report().transfer == "gds"


# --- what goes wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["short", "none", -1, -5008, -5044, 10**9])
def test_counts(tmp_path: Path, plug: Plug, fault: Any) -> None:
    """A short transfer continues; a failed block goes through the host, and the report says why."""
    value, path = state(), tmp_path / "a.pt"
    wanted = stocks(value, path)
    for number in (1, 7):
        fake = plug(number)
        fake.faults[number] = fault
        fastserial.install(**SMALL, transfer="gds")
        with _warned(fault):
            torch.save(value, path)
        assert path.read_bytes() == wanted
        goes_on = fault == "short"
        assert (last_save().transfer == "gds") == goes_on, last_save()
        fake.faults = {fake.transfers + number: fault}
        ring_module._warned.clear()
        with _warned(fault):
            found = torch.load(path, map_location=HERE)
        assert same(found, value)
        assert (last_report().transfer == "gds") == goes_on, last_report()
        if fault == -5008:
            assert "GDS is not supported on the current file (5008)" in last_report().transfer_why
        assert fake.device.faults == []


def _warned(fault: Any) -> Any:
    if fault == "short":
        return fastserial.options()
    return pytest.warns(UserWarning, match="transfer 'gds': cuFile.*from there on")


# --- whether it can be had ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "status", "said"),
    [
        ("driver_open", 5001, r"cuFileDriverOpen: .*\(5001\)"),
        ("buf_register", 5009, r"cuFileBufRegister: .*\(5009\)"),
        ("handle_register", 5008, r"cuFileHandleRegister: GDS is not supported.*\(5008\)"),
        ("set_parameter_bool", 5022, r"cuFileDriverOpen: .*\(5022\)"),
    ],
)
def test_refused_at_the_start(
    tmp_path: Path, plug: Plug, call: str, status: int, said: str
) -> None:
    value, path = state(), tmp_path / "a.pt"
    wanted = stocks(value, path)
    fake = plug(1)
    fake.refusals[call] = status
    fastserial.install(**SMALL, transfer="gpu_batch")
    with pytest.warns(UserWarning, match=f"transfer 'gpu_batch': {said}"):
        torch.save(value, path)
    assert path.read_bytes() == wanted
    assert last_save().transfer == "cpu_async_gpu"
    assert same(torch.load(path, map_location=HERE), value)  # said once
    assert last_report().transfer == "cpu_async_gpu"
    assert not fake.moved


@pytest.mark.parametrize("compat", [True, False])
def test_never_compat(tmp_path: Path, plug: Plug, compat: bool) -> None:
    """cuFile may not go through the host by itself; who opened it before may have allowed that."""
    fake = plug(1)
    fake.opened, fake.compat = True, compat
    fastserial.install(**SMALL, transfer="gds")
    if compat:
        with pytest.warns(UserWarning, match="CUFILE_ALLOW_COMPAT_MODE=false"):
            torch.save(state(), tmp_path / "a.pt")
    else:
        torch.save(state(), tmp_path / "a.pt")
    assert (last_save().transfer == "gds") == (not compat)
    assert bool(fake.moved) == (not compat)
    fake = plug(1)
    torch.save(state(), tmp_path / "a.pt")
    assert fake.compat is False  # it forbids it itself
