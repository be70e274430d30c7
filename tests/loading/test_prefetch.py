"""The storages that are read ahead: order, memory, damage."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import random
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpus import MIB, TORCH, noise
from support.identity import digest, fast, stock
from support.loading import last_report

from fastserial.config import Config
from fastserial.errors import CorruptCheckpointError
from fastserial.formats.source import DescriptorSource
from fastserial.formats.zip.records import read_places, storage_records
from fastserial.loading import arriving, planner
from fastserial.loading import prefetch as prefetch_module
from fastserial.loading.prefetch import Prefetch
from fastserial.loading.prefetch import _State as State
from fastserial.loading.reader import FastFileReader
from fastserial.loading.sinks import HostSink
from fastserial.memory import huge_pages
from fastserial.reports import last_load_report

SIZES = [3, 700, 5000, 64, 2 * MIB, 90_000, 1, 600_000, 4096, 3 * MIB + 5, 12]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "f.pt"
    torch.manual_seed(5)
    with stock():
        torch.save([noise(size) for size in SIZES], file)
    return file


@contextmanager
def opened(path: Path, verify: bool = False, **options: Any) -> Iterator[tuple[Prefetch, Any]]:
    with FastFileReader(path, Config(small_file=0, **options)) as file:
        records = storage_records(read_places(DescriptorSource(file.fd)))
        ahead = Prefetch(file, records, verify)
        ahead.start()
        try:
            yield ahead, {record.name: record for record in records}
        finally:
            ahead.close()


def content(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


OPTIONS: list[dict[str, Any]] = [
    {},
    {"cache": "drop"},
    {"direct": True, "block_size": 4096, "queue_depth": 2},
    {"direct": False, "block_size": 65536, "threads": 1},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("order", ["forwards", "backwards", "random"])
def test_any_order(path: Path, order: str, verify: bool, options: dict[str, Any]) -> None:
    data = path.read_bytes()
    with opened(path, verify, **options) as (ahead, records):
        names = list(records)
        if order == "backwards":
            names.reverse()
        elif order == "random":
            random.Random(3).shuffle(names)
        for name in names:
            record = records[name]
            storage = ahead.take(name, record.size)
            assert storage is not None
            assert content(storage) == data[record.data_offset : record.data_end]
            assert storage.data_ptr() % 64 == 0
            assert ahead.take(name, record.size) is None  # once only
        assert ahead.take("data/99", 5) is None


def test_records_that_nobody_asks_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch_module, "LOOK_AHEAD", 1)  # else it may be done before we look
    monkeypatch.setattr(prefetch_module, "READ_TOGETHER", 1)
    before = len(os.listdir("/proc/self/task"))
    with opened(path) as (ahead, records):
        assert ahead.take("data/4", records["data/4"].size) is not None
        assert len(os.listdir("/proc/self/task")) > before
    while len(os.listdir("/proc/self/task")) > before:  # or pytest's time limit ends it
        time.sleep(0.01)


@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_look_ahead_is_bounded(tmp_path: Path, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch_module, "LOOK_AHEAD", 3 * MIB)
    monkeypatch.setattr(prefetch_module, "READ_TOGETHER", MIB)
    path = tmp_path / "f.pt"
    with stock():
        torch.save([noise(MIB) for _ in range(20)], path)
    waiting: list[int] = []
    arrived = Prefetch._arrived

    def there(ahead: Prefetch) -> int:
        batches = [batch for batch, _ in list(ahead._by_name.values())]
        return sum(batch.state is State.COMPLETE for batch in batches)

    def noted(self: Prefetch, *arguments: Any) -> None:
        arrived(self, *arguments)
        waiting.append(there(self))

    monkeypatch.setattr(Prefetch, "_arrived", noted)
    with opened(path, direct=False) as (ahead, records):
        while there(ahead) < 2:  # or pytest's time limit ends it
            time.sleep(0.01)
        names = list(records) if order == "forwards" else list(records)[::-1]
        for name in names:
            assert ahead.take(name, MIB) is not None
    assert len(waiting) >= 20
    assert 2 <= max(waiting) <= 3


@pytest.mark.parametrize("options", [{"direct": True}, {"direct": False}])
def test_memory_is_the_callers(path: Path, options: dict[str, Any]) -> None:
    """A storage that was taken and dropped frees its memory at once."""
    with opened(path, **options) as (ahead, _):
        batch, record = ahead._by_name["data/9"]
        storage = ahead.take("data/9", record.size)
        assert storage is not None
        seen = weakref.ref(storage)
        assert "data/9" not in batch._arriving
        del storage
        assert seen() is None


def test_direct_reads_come_where_they_belong(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a large record; of the others a copy is made."""
    large = 4096
    monkeypatch.setattr(planner, "IN_PLACE", large)
    monkeypatch.setattr(arriving, "IN_PLACE", large)
    moved: list[int] = []
    deliver = HostSink.deliver

    def counted(self: HostSink, view: memoryview, address: int, start: int) -> None:
        if address != self.address + start:
            moved.append(len(view))
        deliver(self, view, address, start)

    monkeypatch.setattr(HostSink, "deliver", counted)
    data = path.read_bytes()
    with opened(path, direct=True, block_size=65536) as (ahead, records):
        if ahead._pump.fallback is not None:
            pytest.skip("no direct I/O here")
        for name, record in records.items():
            storage = ahead.take(name, record.size)
            assert storage is not None
            assert content(storage) == data[record.data_offset : record.data_end]
        assert ahead._pump.counts.cached < 65536
    small = sum(record.size for record in records.values() if record.size < large)
    heads = sum(record.data_offset - record.header_offset for record in records.values())
    assert small <= sum(moved) <= small + heads


def test_other_sizes_than_the_records(path: Path) -> None:
    with opened(path) as (ahead, _):
        assert ahead.take("data/2", 4999) is None
        assert ahead.take("data/4", 3 * MIB) is None


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("name", ["data/2", "data/4"])
def test_local_headers_that_lie(path: Path, name: str, verify: bool) -> None:
    """torch must read such a record itself; where it is to be checked, that is damage."""
    with path.open("r+b") as file:
        record = read_places(DescriptorSource(file.fileno())).find(name)
        assert record is not None
        file.seek(record.header_offset + 28)  # length of the extra field
        file.write(b"\x07\x00")
    with opened(path, verify) as (ahead, records):
        if verify:
            with pytest.raises(CorruptCheckpointError, match="header"):
                ahead.take(name, records[name].size)
        else:
            assert ahead.take(name, records[name].size) is None


def test_the_file_shrinks(path: Path) -> None:
    with FastFileReader(path, Config(small_file=0, direct=False)) as file:
        records = storage_records(read_places(DescriptorSource(file.fd)))
        ahead = Prefetch(file, records, False)
        os.truncate(path, 100_000)
        ahead.start()
        with pytest.raises(CorruptCheckpointError, match="shorter"):
            for record in records:
                ahead.take(record.name, record.size)
        ahead.close()


def test_no_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> torch.UntypedStorage:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(arriving, "new_storage", refuse)
    with opened(path) as (ahead, records), pytest.raises(RuntimeError, match="allocate"):
        ahead.take("data/0", records["data/0"].size)


@pytest.mark.parametrize(("options", "good"), [({"direct": True}, 3), ({"direct": False}, 0)])
def test_an_engine_that_fails_leaves_the_rest_to_torch(
    path: Path, options: dict[str, Any], good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastserial.engines import threads

    real, calls = threads.transfer, []

    def failing(request: Any, done: int = 0) -> int:
        calls.append(1)
        if len(calls) > good:
            raise OSError(5, "Input/output error")
        return real(request, done)

    with stock():
        want = digest(torch.load(path))
    with fast(small_file=0, block_size=65536, threads=1, **options):
        monkeypatch.setattr(threads, "transfer", failing)
        found = torch.load(path)
    assert digest(found) == want
    assert len(calls) > good


@pytest.mark.parametrize("alignment", [1, 8, 512, 4096])
def test_alignments_of_storages(alignment: int, tmp_path: Path) -> None:
    if TORCH < (2, 7):
        pytest.skip("needs torch 2.7")
    from torch.utils.serialization import config

    path = tmp_path / "f.pt"
    config.save.storage_alignment = alignment
    try:
        with stock():
            torch.save([noise(size) for size in SIZES], path)
    finally:
        config.save.storage_alignment = 64
    with stock():
        want = digest(torch.load(path))
    with fast(small_file=0):
        found = torch.load(path)
    assert digest(found) == want
    assert all(one.data_ptr() % 64 == 0 for one in found)
    report = last_report()
    assert report.engine == "threads"


def test_order_of_torch_2_6(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files hold 0, 1, 10, 11, ..., 2; the pickle asks for 0, 1, 2."""
    import zipfile

    monkeypatch.setattr(prefetch_module, "LOOK_AHEAD", 2 * MIB)
    path, sorted_path = tmp_path / "f.pt", tmp_path / "s.pt"
    with stock():
        torch.save([noise(300_000 + i * 40_000) for i in range(23)], path)
        want = digest(torch.load(path))
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(sorted_path, "w") as new:
        for name in sorted(old.namelist(), key=lambda name: ("data/" in name, name)):
            new.writestr(name, old.read(name))
    for options in OPTIONS:
        with fast(small_file=0, **options):
            assert digest(torch.load(sorted_path)) == want
        report = last_report()
        assert report.engine == "threads"


def test_a_load_brings_no_more_collections_than_stock(tmp_path: Path) -> None:
    """A collection looks at all objects of torch, which takes as long as loading 100 MB."""
    path = tmp_path / "many.pt"
    with stock():
        torch.save([noise(200_000) for _ in range(200)], path)
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    def collections() -> int:
        gc.collect()
        found.clear()
        torch.load(path)
        return len(found)

    gc.callbacks.append(note)
    try:
        with stock():
            collections()
            most = collections()
        with fast():
            collections()
            ours = collections()
            assert last_load_report().engine == "threads"
    finally:
        gc.callbacks.remove(note)
    assert ours <= most + 1


TOUCHED, ADVISED = 2 * MIB, 8 * MIB


@pytest.mark.parametrize(
    ("slow", "first", "second"),
    [
        (-1.0, [TOUCHED, ADVISED, TOUCHED], []),
        (
            float("inf"),
            2 * [TOUCHED, ADVISED, ADVISED],  # the next one twice as far away
            [ADVISED, ADVISED, TOUCHED, ADVISED, ADVISED],
        ),
    ],
)
def test_huge_pages_that_are_slow_are_asked_for_no_more(
    monkeypatch: pytest.MonkeyPatch, slow: float, first: list[int], second: list[int]
) -> None:
    advised: list[int] = []
    monkeypatch.setattr(huge_pages, "SLOW_TOUCH", slow)
    monkeypatch.setattr(
        huge_pages, "_advise", lambda address, nbytes, *advices: advised.append(nbytes)
    )
    memory = torch.UntypedStorage(34 * MIB)
    start = memory.data_ptr() + -memory.data_ptr() % (2 * MIB)
    pages = huge_pages.HugePages()
    pages.advise(start, 32 * MIB)
    assert advised == first
    assert pages.are_slow is (slow < 0)
    pages.advise(start, 32 * MIB)
    assert advised == first + second


def test_a_slow_huge_page_lets_the_next_one_be_timed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is at hand ends somewhere: little more is asked for there."""
    touched: list[int] = []
    slow = {3, 4}
    clock = iter(range(1, 1000))

    def madvise(address: int, nbytes: int, advice: int) -> int:
        touched.append(address)
        return 0

    def thread_time() -> float:
        return next(clock) * 0.5 if len(touched) in slow else 0.0

    monkeypatch.setattr(huge_pages, "_advise", lambda address, nbytes, *advices: None)
    monkeypatch.setattr(huge_pages, "_madvise", madvise)
    monkeypatch.setattr(huge_pages, "thread_time", thread_time)
    pages = huge_pages.HugePages()
    pages.advise(0, 256 * MIB)
    assert [address // MIB for address in touched] == [0, 16, 48, 56]
    assert pages.are_slow


@pytest.mark.parametrize("edges", [0, 1, 3])
def test_pieces_of_malloc_come_on_huge_pages(monkeypatch: pytest.MonkeyPatch, edges: int) -> None:
    """Pages that malloc itself touched are gathered, those that a neighbour shares among them."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(
        huge_pages,
        "_madvise",
        lambda address, nbytes, advice: told.append((advice, address // (2 * MIB))),
    )
    page = 2 * MIB
    base = 100 * page
    cuts = [base + page // 2 + page * (1 + k) for k in range(edges)]
    places = [base - 5000, *cuts, base + 6 * page + 5000]
    ranges = [(a, b - a - 16) for a, b in itertools.pairwise(places)]
    huge_pages.HugePages().advise_all(reversed(ranges))
    gathered = [number for advice, number in told if advice == huge_pages._MADV_COLLAPSE]
    assert gathered == [99, *(101 + k for k in range(edges)), 106]
    asked = [number for advice, number in told if advice != huge_pages._MADV_COLLAPSE]
    assert all(100 <= number < 106 for number in asked)
