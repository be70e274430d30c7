"""Saves of tensors on a device, by a device that completes its copies late and out of order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpus import noise
from support.devices import FakeDevice, Fault, plugged_in
from support.identity import last_save, stock

import fastserial
from fastserial import FastFileWriter
from fastserial.checksums import CrcLedger, crc32
from fastserial.config import Config
from fastserial.formats.extents import Data, Extent, Literal
from fastserial.memory import buffers as ring_module
from fastserial.memory import devices, storages
from fastserial.memory.buffers import Buffer, Ring
from fastserial.memory.storages import StorageMemory
from fastserial.overlap import snapshot

SMALL: dict[str, Any] = {"block_size": 16384, "queue_depth": 3, "small_file": 0, "durable": False}
Plug = Callable[[int], FakeDevice]


@pytest.fixture
def plug(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plug]:
    """Make the device of a save; all tensors are on it, but for the fourth and so on."""
    device = plugged_in(monkeypatch, FakeDevice())
    monkeypatch.setattr(storages, "device_types", lambda storages: {"fake"})
    monkeypatch.setattr(storages, "is_on_host", lambda storage: storage.nbytes() % 3 == 0)
    yield lambda seed: device.renew(seed, haste=(seed % 10) / 10)
    fastserial.uninstall()


def state() -> dict[str, torch.Tensor]:
    sizes = {"device": 100_000, "small": 1_000, "host": 30_000, "empty": 0, "block": 16384 // 4}
    values = {name: noise(size) for name, size in sizes.items()}
    return {**values, "view": values["device"][5:50], "byte": torch.arange(7, dtype=torch.uint8)}


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_bytes_of_stock(tmp_path: Path, plug: Plug, zipped: bool) -> None:
    value = state()
    path = tmp_path / "a.pt"
    with stock():
        torch.save(value, path, _use_new_zipfile_serialization=zipped)
    wanted = path.read_bytes()
    copies = 0
    for seed in range(12):
        device = plug(seed)
        options = dict(SMALL, direct=(False, "auto")[seed % 2])
        fastserial.install(**options)
        torch.save(value, path, _use_new_zipfile_serialization=zipped)
        assert path.read_bytes() == wanted, seed
        assert device.faults == []
        assert last_save().transfer == "cpu_async_gpu"
        assert "transfer=cpu_async_gpu (auto: " in str(last_save())
        copies += device.copies
    assert copies > 50


def extents(tensors: list[torch.Tensor]) -> tuple[list[Extent], CrcLedger]:
    found: list[Extent] = []
    at = 0
    for record, tensor in enumerate(tensors):
        memory = StorageMemory(tensor.untyped_storage())
        for source, length in (
            (Literal(b"before"), 6),
            (Data(memory, tensor.nbytes, record), tensor.nbytes),
        ):
            found.append(Extent(at, length, source))
            at += length
    return found, CrcLedger([t.nbytes for t in tensors], [None] * len(tensors))


def is_saved_as_it_will_be(device: FakeDevice, path: Path) -> bool:
    """Save what a kernel is still writing when the save begins, and another overwrites later."""
    wanted = [noise(size) for size in (5_000, 20_000)]
    tensors = [torch.zeros_like(one) for one in wanted]
    for tensor, one in zip(tensors, wanted, strict=True):
        device.kernel(lambda tensor=tensor, one=one: tensor.copy_(one))
    layout, ledger = extents(tensors)
    with FastFileWriter(path, Config(**SMALL)) as writer:
        writer.write_layout(layout, sum(extent.length for extent in layout), ledger)
    for tensor in tensors:
        device.kernel(tensor.zero_)
    device.finish()
    parts = b"".join(b"before" + one.numpy().tobytes() for one in wanted)
    crcs = [crc32(one.numpy()) for one in wanted]
    return path.read_bytes() == parts and ledger.wait_all() == crcs


def test_after_the_programs_kernels(tmp_path: Path, plug: Plug) -> None:
    for seed in range(20):
        assert is_saved_as_it_will_be(plug(seed), tmp_path / "a"), seed


def never_waits(ring: Ring, buffer: Buffer) -> None:
    ring._fences[buffer.index].clear()


def never_follows(ring: Ring, places: object) -> bool:
    place = torch.device("cpu")  # what the device goes by
    ring._streams[place] = devices.copy_stream(place)
    return True


@pytest.mark.parametrize(("method", "bug"), [("arrive", never_waits), ("join", never_follows)])
def test_bugs_that_are_put_in_are_found(
    tmp_path: Path, plug: Plug, monkeypatch: pytest.MonkeyPatch, method: str, bug: Any
) -> None:
    """The negative control: a ring that waits neither for its copies nor for the program."""
    monkeypatch.setattr(Ring, method, bug)
    found = 0
    for seed in range(20):
        try:
            found += not is_saved_as_it_will_be(plug(seed), tmp_path / "a")
        except Fault:
            found += 1
    assert found > 2


# --- which way ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "taken", "why"),
    [
        ({}, "cpu_async_gpu", "auto: "),
        ({"transfer": "cpu_async_gpu"}, "cpu_async_gpu", "asked for"),
        ({"transfer": "cpu_gpu"}, "cpu_gpu", "asked for"),
        ({"transfer": "cpu"}, "cpu_gpu", "asked for"),
        ({"transfer": "cpu_cached_gpu"}, "cpu_cached_gpu", "asked for"),
        ({"block_size": 32 << 20}, "cpu_gpu", "set a smaller block_size"),
        ({"small_file": 64 << 20}, "cpu_gpu", "a small file"),
    ],
)
def test_words(tmp_path: Path, plug: Plug, options: dict[str, Any], taken: str, why: str) -> None:
    device = plug(1)
    fastserial.install(**{**SMALL, **options})
    torch.save(state(), tmp_path / "a.pt")
    assert (last_save().transfer, last_save().transfer_why[: len(why)] == why) == (taken, True) or (
        last_save().transfer == taken and why in last_save().transfer_why
    )
    assert bool(device.copies) == (taken not in ("cpu", "cpu_gpu"))
    if taken == "cpu_cached_gpu":
        assert not last_save().direct


@pytest.mark.parametrize("word", ["gds", "gpu_async", "gpu_batch"])
def test_without_cufile(
    tmp_path: Path, plug: Plug, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be had is said once, and the next best taken."""
    monkeypatch.setattr(ring_module, "_warned", set())
    plug(1)
    fastserial.install(**SMALL, transfer=word)
    with pytest.warns(UserWarning, match=f"transfer '{word}': .*cuFile"):
        torch.save(state(), tmp_path / "a.pt")
    torch.save(state(), tmp_path / "a.pt")
    assert last_save().transfer == "cpu_async_gpu"
    assert last_save().transfer_why.startswith(f"{word}: ")


def test_without_pinned_memory(tmp_path: Path, plug: Plug, monkeypatch: pytest.MonkeyPatch) -> None:
    def pin(nbytes: int) -> None:
        raise RuntimeError("out of memory")

    fastserial.free_pinned()
    plug(1)
    monkeypatch.setattr(devices, "pin", pin)
    fastserial.install(**SMALL)
    torch.save(state(), tmp_path / "a.pt")
    assert (last_save().transfer, last_save().transfer_why) == (
        "cpu_gpu",
        "no pinned memory: out of memory",
    )


# --- saves beside the program -------------------------------------------------------------------


def test_snapshots(tmp_path: Path, plug: Plug, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied at the call is what the program's kernels will have made of it."""
    monkeypatch.setattr(snapshot, "is_on_host", lambda storage: False)
    monkeypatch.setattr(ring_module, "THROUGH_RING", 1)
    fastserial.install(**SMALL)
    wanted = state()
    for seed in range(5):
        device = plug(seed)
        value = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
        for name, tensor in value.items():
            device.kernel(lambda tensor=tensor, name=name: tensor.copy_(wanted[name]))
        pending = fastserial.save_async(value, tmp_path / "a.pt")
        for tensor in value.values():
            device.kernel(tensor.zero_)
        pending.wait()
        device.finish()
        loaded = torch.load(tmp_path / "a.pt")
        assert all(torch.equal(loaded[name], tensor) for name, tensor in wanted.items())
        assert device.copies >= 5
