"""Saves of tensors on a device, by a device that completes its copies late and out of order."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpus import noise
from support.devices import FakeDevice, Fault, plugged_in
from support.identity import stock

import fastserial
from fastserial import FastFileWriter, SaveReport, StorageChangedError
from fastserial.checksums import CrcLedger, crc32
from fastserial.config import Config
from fastserial.config.performance import PINNED_RING
from fastserial.engines.threads import ThreadsEngine
from fastserial.formats.extents import Data, Extent, Literal
from fastserial.memory import buffers as ring_module
from fastserial.memory import devices, storages
from fastserial.memory.buffers import Buffer, Ring, pinned_store
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


def report() -> SaveReport:
    found = fastserial.last_save_report()
    assert found is not None
    return found


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
        assert report().transfer == "cpu_async_gpu"
        assert "transfer=cpu_async_gpu (auto: " in str(report())
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


def test_after_the_programs_kernels(tmp_path: Path, plug: Plug) -> None:
    """What a kernel is still writing when the save begins is saved as it will be."""
    wanted = [noise(size) for size in (5_000, 20_000)]
    for seed in range(6):
        device = plug(seed)
        tensors = [torch.zeros_like(one) for one in wanted]
        for tensor, one in zip(tensors, wanted, strict=True):
            device.kernel(lambda tensor=tensor, one=one: tensor.copy_(one))
        layout, ledger = extents(tensors)
        with FastFileWriter(tmp_path / "a", Config(**SMALL)) as writer:
            writer.write_layout(layout, sum(extent.length for extent in layout), ledger)
        for tensor in tensors:
            device.kernel(tensor.zero_)
        device.finish()
        parts = b"".join(b"before" + one.numpy().tobytes() for one in wanted)
        assert (tmp_path / "a").read_bytes() == parts
        assert ledger.wait_all() == [crc32(one.numpy()) for one in wanted]


def test_schedules_would_show_it(
    tmp_path: Path, plug: Plug, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: a ring that does not wait for its copies writes poison."""

    def arrive(ring: Ring, buffer: Buffer) -> None:
        ring._fences[buffer.index].clear()

    few = {"a": noise(10_000)}  # no buffer is used again
    with stock():
        torch.save(few, tmp_path / "a.pt")
    wanted = (tmp_path / "a.pt").read_bytes()
    monkeypatch.setattr(Ring, "arrive", arrive)
    plug(0)  # which is in no haste
    fastserial.install(**SMALL)
    torch.save(few, tmp_path / "a.pt")
    assert (tmp_path / "a.pt").read_bytes() != wanted
    with pytest.raises(Fault, match="before a copy was complete"):
        torch.save(state(), tmp_path / "b.pt")


def test_engine_threads_wait(tmp_path: Path, plug: Plug, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many cores the engine's threads wait for the copies; else the saving thread does."""
    real = ThreadsEngine.__init__
    monkeypatch.setattr(
        ThreadsEngine,
        "__init__",
        lambda self, threads: real(self, threads, prepare_here=False),
    )
    value = state()
    with stock():
        torch.save(value, tmp_path / "a.pt")
    wanted = (tmp_path / "a.pt").read_bytes()
    fastserial.install(**SMALL)
    for seed in range(6):
        plug(seed)
        torch.save(value, tmp_path / "a.pt")
        assert (tmp_path / "a.pt").read_bytes() == wanted


def test_memory_is_kept_between_saves(tmp_path: Path, plug: Plug) -> None:
    fastserial.free_pinned()
    device = plug(0)
    fastserial.install(**SMALL)
    held = set()
    for _ in range(3):
        torch.save(state(), tmp_path / "a.pt")
        held.add(len(pinned_store._all))
    assert len(held) == 1
    assert len(device._streams) == 2  # the program's, and one that is kept with the memory
    assert fastserial.free_pinned() == PINNED_RING * held.pop()
    torch.save(state(), tmp_path / "a.pt")
    assert report().transfer == "cpu_async_gpu"


def test_a_storage_resized_meanwhile(
    tmp_path: Path, plug: Plug, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save ends with an error; the old file stays, and the copies are over by then."""
    device = plug(3)
    (tmp_path / "a.pt").write_bytes(b"old")
    value = {"a": noise(200_000)}
    real = Ring.fetch

    def fetch(ring: Ring, buffer: Buffer, pieces: Any) -> None:
        real(ring, buffer, pieces)
        if device.copies > 4:
            device.finish()  # a device does not unmap what is freed; the host does
            value["a"].untyped_storage().resize_(0)

    monkeypatch.setattr(Ring, "fetch", fetch)
    fastserial.install(**SMALL)
    with pytest.raises(StorageChangedError):
        torch.save(value, tmp_path / "a.pt")
    assert (tmp_path / "a.pt").read_bytes() == b"old"
    assert not any(stream.steps for stream in device._streams)
    assert os.listdir(tmp_path) == ["a.pt"]


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
    assert (report().transfer, report().transfer_why[: len(why)] == why) == (taken, True) or (
        report().transfer == taken and why in report().transfer_why
    )
    assert bool(device.copies) == (taken not in ("cpu", "cpu_gpu"))
    if taken == "cpu_cached_gpu":
        assert not report().direct


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
    assert report().transfer == "cpu_async_gpu"
    assert report().transfer_why.startswith(f"{word}: ")


def test_without_streams(tmp_path: Path, plug: Plug, monkeypatch: pytest.MonkeyPatch) -> None:
    plug(1)
    monkeypatch.setattr(devices, "has_streams", lambda place: False)
    fastserial.install(**SMALL)
    torch.save(state(), tmp_path / "a.pt")
    assert report().transfer == "cpu_gpu"
    assert report().transfer_why == "torch has no streams for cpu"


def test_without_pinned_memory(tmp_path: Path, plug: Plug, monkeypatch: pytest.MonkeyPatch) -> None:
    def pin(nbytes: int) -> None:
        raise RuntimeError("out of memory")

    fastserial.free_pinned()
    plug(1)
    monkeypatch.setattr(devices, "pin", pin)
    fastserial.install(**SMALL)
    torch.save(state(), tmp_path / "a.pt")
    assert (report().transfer, report().transfer_why) == (
        "cpu_gpu",
        "no pinned memory: out of memory",
    )


def test_saves_beside_each_other(tmp_path: Path, plug: Plug) -> None:
    """Two may have pinned memory; more of them go without, and all are right."""
    plug(2)
    value = state()
    with stock():
        torch.save(value, tmp_path / "0.pt")
    wanted = tmp_path / "wanted"
    (tmp_path / "0.pt").rename(wanted)
    reports: list[SaveReport] = []
    fastserial.install(**SMALL, on_report=reports.append)
    rings = [pinned_store.take(), pinned_store.take()]
    torch.save(value, tmp_path / "0.pt")
    assert (tmp_path / "0.pt").read_bytes() == wanted.read_bytes()
    for pinned in rings:
        assert pinned is not None
        pinned_store.give(pinned)
    threads = [
        threading.Thread(target=torch.save, args=(value, tmp_path / str(i) / "0.pt"))
        for i in range(3)
    ]
    for i, thread in enumerate(threads):
        (tmp_path / str(i)).mkdir()
        thread.start()
    for i, thread in enumerate(threads):
        thread.join()
        assert (tmp_path / str(i) / "0.pt").read_bytes() == wanted.read_bytes()
    assert reports[0].transfer_why == "other saves or loads use the pinned memory"
    assert {report.transfer for report in reports} == {"cpu_gpu", "cpu_async_gpu"}


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
        pending = fastserial.save_async(value, tmp_path / "a.pt", snapshot="copy")
        for tensor in value.values():
            device.kernel(tensor.zero_)
        pending.wait()
        device.finish()
        loaded = torch.load(tmp_path / "a.pt")
        assert all(torch.equal(loaded[name], tensor) for name, tensor in wanted.items())
        assert device.copies >= 5
