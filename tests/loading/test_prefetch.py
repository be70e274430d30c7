"""The storages that are read ahead: order, memory, damage."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import signal
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpus import MIB, noise
from support.identity import digest, fast, saved, stock
from support.limits import peak
from support.loading import last_report

from fastserial.config import Config
from fastserial.engines import threads
from fastserial.errors import CorruptCheckpointError, EngineError
from fastserial.formats.source import DescriptorSource
from fastserial.formats.zip_format import read_places, storage_records
from fastserial.loading import prefetch as prefetch_module
from fastserial.loading import session
from fastserial.loading.prefetch import Prefetch
from fastserial.loading.reader import FastFileReader
from fastserial.memory.huge_pages import HugePages

SIZES = [3, 700, 5000, 64, 2 * MIB, 90_000, 1, 600_000, 4096, 3 * MIB + 5, 12]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(5)
    return saved(tmp_path, [noise(size) for size in SIZES])


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


@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_look_ahead_is_bounded(tmp_path: Path, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch_module, "LOOK_AHEAD", 3 * MIB)
    monkeypatch.setattr(prefetch_module, "READ_TOGETHER", MIB)
    path = saved(tmp_path, [noise(MIB) for _ in range(20)])
    held: list[int] = []
    with opened(path, direct=False) as (ahead, records):
        names = list(records) if order == "forwards" else list(records)[::-1]
        for name in names:
            groups = {id(group): group for group in ahead._group_of.values()}
            held.append(sum(len(group.records) for group in groups.values()))
            assert ahead.take(name, MIB) is not None
    assert 2 <= max(held) <= 3


@pytest.mark.parametrize("asked", [0, 1])
@pytest.mark.parametrize("verify", [False, True])
def test_a_record_that_nobody_asks_for_costs_no_memory(
    asked: int, verify: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the look-ahead, as with stock."""
    monkeypatch.setattr(prefetch_module, "LOOK_AHEAD", 8 * MIB)
    with zipfile.ZipFile(saved(tmp_path, [noise(5000)])) as file:
        pickled, data = file.read("f/data.pkl"), file.read("f/data/0")
    key = b"X\x01\x00\x00\x00%d"
    records = {"data/0": bytes(64 * MIB), "data/1": bytes(64 * MIB)} | {f"data/{asked}": data}
    records["data.pkl"] = pickled.replace(key % 0, key % asked)
    writer = torch._C.PyTorchFileWriter(str(tmp_path / "f.pt"))
    for name, body in records.items():
        writer.write_record(name, body, len(body))
    writer.write_end_of_file()
    found = []

    def load() -> None:
        found.append(digest(torch.load(tmp_path / "f.pt")))

    with stock():
        load()
        stocks = peak(load)
    with fast(small_file=0, direct=False, verify_on_load=verify):
        load()
        ours = peak(load)
    assert len(set(found)) == 1
    assert last_report().engine == "threads"
    assert ours < stocks + 16 * MIB


def test_the_file_shrinks(path: Path) -> None:
    with FastFileReader(path, Config(small_file=0, direct=False)) as file:
        records = storage_records(read_places(DescriptorSource(file.fd)))
        os.truncate(path, 100_000)
        ahead = Prefetch(file, records, False)
        ahead.start()
        with pytest.raises(CorruptCheckpointError, match="shorter"):
            for record in records:
                ahead.take(record.name, record.size)
        ahead.close()


PLACES: dict[str, tuple[Any, str]] = {
    "reader": (session, "FastFileReader"),
    "plan": (prefetch_module, "_groups_of"),
    "allocation": (prefetch_module, "new_storage"),
    "pages": (HugePages, "advise_all"),
    "submit": (threads.ThreadsEngine, "submit"),
    "wait": (threads.ThreadsEngine, "wait"),
    "transfer": (threads, "transfer"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "error", [RuntimeError("alarm"), OSError(errno.EIO, "alarm"), TimeoutError("alarm"), KeyError()]
)
def test_what_a_signal_handler_raises_is_raised(
    place: str, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what looks like an error of torch's or of the disk: torch does not take over."""
    owner, function = PLACES[place]

    def interrupted(*args: object, **keywords: object) -> None:
        signal.raise_signal(signal.SIGUSR1)

    def handler(number: int, frame: object) -> None:
        raise error

    file = saved(tmp_path, [noise(MIB)])
    monkeypatch.setattr(owner, function, interrupted)
    if place == "transfer":  # on this thread
        monkeypatch.setattr(threads.ThreadsEngine, "_start", lambda self, op: None)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with fast(small_file=0), pytest.raises(type(error)) as caught:
            torch.load(file)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert caught.value is error


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("plan_blocks", MemoryError("planted")),
        ("new_storage", RuntimeError("planted")),
        ("wait", OSError(errno.ENOMEM, "planted")),
        ("wait", EngineError("planted")),
    ],
)
def test_torch_reads_what_is_left(
    path: Path, where: str, error: Exception, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stock():
        want = digest(torch.load(path))
    monkeypatch.setattr(prefetch_module, "READ_TOGETHER", MIB)
    owner: Any = threads.ThreadsEngine if where == "wait" else prefetch_module
    real, calls = getattr(owner, where), []

    def failing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == nth:
            raise error
        return real(*args)

    with fast(small_file=0, block_size=65536):
        monkeypatch.setattr(owner, where, failing)
        assert digest(torch.load(path)) == want
    assert len(calls) < nth or "planted" in str(last_report().fallback)
