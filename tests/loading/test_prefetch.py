"""The storages that are read ahead: order, memory, damage."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import os
import random
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpus import MIB, noise
from support.identity import digest, fast, stock
from support.loading import last_report

from fastserial.config import Config
from fastserial.engines import survey
from fastserial.errors import CorruptCheckpointError, EngineError
from fastserial.formats.source import DescriptorSource
from fastserial.formats.zip_format import read_places, storage_records
from fastserial.loading import prefetch as prefetch_module
from fastserial.loading import session
from fastserial.loading.prefetch import Prefetch
from fastserial.loading.reader import FastFileReader

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


@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_look_ahead_is_bounded(tmp_path: Path, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch_module, "LOOK_AHEAD", 3 * MIB)
    monkeypatch.setattr(prefetch_module, "READ_TOGETHER", MIB)
    path = tmp_path / "f.pt"
    with stock():
        torch.save([noise(MIB) for _ in range(20)], path)
    held: list[int] = []
    with opened(path, direct=False) as (ahead, records):
        names = list(records) if order == "forwards" else list(records)[::-1]
        for name in names:
            groups = {id(group): group for group in ahead._group_of.values()}
            held.append(sum(len(group.records) for group in groups.values()))
            assert ahead.take(name, MIB) is not None
    assert 2 <= max(held) <= 3


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


def test_an_ended_load_keeps_no_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch_module, "LOOK_AHEAD", MIB)
    monkeypatch.setattr(prefetch_module, "READ_TOGETHER", MIB)
    gc.disable()
    try:
        with opened(path, direct=False) as (ahead, _):
            storages = [
                weakref.ref(record)
                for group in set(ahead._group_of.values())
                for record in group.records.values()
            ]
            assert storages
        assert not [one for one in storages if one() is not None]
    finally:
        gc.enable()


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


def test_without_memory_torch_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nbytes: int) -> torch.UntypedStorage:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with stock():
        want = digest(torch.load(path))
    monkeypatch.setattr(prefetch_module, "new_storage", refuse)
    with fast(small_file=0):
        assert digest(torch.load(path)) == want
    assert "allocate memory" in str(last_report().fallback)


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


def _raising(error: BaseException) -> Any:
    def raise_it(*args: object, **keywords: object) -> Any:
        raise error

    return raise_it


@pytest.mark.parametrize("error", [TimeoutError("alarm"), KeyError("alarm")])
@pytest.mark.parametrize("where", ["allocation", "submit", "wait", "transfer", "pages"])
def test_what_a_signal_handler_raises_is_raised(
    path: Path, where: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it interrupts this thread: torch does not take over the load."""
    from fastserial.engines import threads
    from fastserial.memory.huge_pages import HugePages

    if where == "allocation":
        monkeypatch.setattr(prefetch_module, "new_storage", _raising(error))
    elif where == "pages":
        monkeypatch.setattr(HugePages, "advise_all", _raising(error))
    elif where == "transfer":
        monkeypatch.setattr(threads, "transfer", _raising(error))
        monkeypatch.setattr(threads.ThreadsEngine, "_start", lambda self, op: None)
    else:
        monkeypatch.setattr(threads.ThreadsEngine, where, _raising(error))
    with fast(small_file=0), pytest.raises(type(error), match="alarm"):
        torch.load(path)


@pytest.mark.parametrize(
    ("fmt", "module", "function"),
    [
        ("zip", session, "_has_room"),
        ("zip", prefetch_module, "_groups_of"),
        ("zip", prefetch_module, "new_storage"),
        ("legacy", session, "_has_room"),
        ("legacy", session, "storage_sink"),
    ],
)
@pytest.mark.parametrize("error", [RuntimeError("alarm"), OSError(errno.EIO, "alarm")])
def test_a_handler_may_raise_while_the_read_ahead_is_planned(
    fmt: str,
    module: Any,
    function: str,
    error: Exception,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its error looks like one of torch's or of the disk, and reaches the caller all the same."""

    def interrupted(*args: object, **keywords: object) -> None:
        signal.raise_signal(signal.SIGUSR1)

    def handler(number: int, frame: object) -> None:
        raise error

    file = tmp_path / "f.pt"
    with stock():
        torch.save([noise(MIB)], file, _use_new_zipfile_serialization=fmt == "zip")
    monkeypatch.setattr(module, function, interrupted)
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with fast(small_file=0), pytest.raises(type(error), match="alarm"):
            torch.load(file)
    finally:
        signal.signal(signal.SIGUSR1, before)


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
    from fastserial.engines.threads import ThreadsEngine

    with stock():
        want = digest(torch.load(path))
    monkeypatch.setattr(prefetch_module, "READ_TOGETHER", MIB)
    owner: Any = ThreadsEngine if where == "wait" else prefetch_module
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


def test_a_record_is_planned_after_an_earlier_pause(path: Path) -> None:
    """Lanes pass a None on behind other blocks, when a record may be waited for already."""
    with FastFileReader(path, Config(small_file=0, direct=False)) as file:
        records = storage_records(read_places(DescriptorSource(file.fd)))
        ahead = Prefetch(file, records, False)
        ahead._blocks = itertools.chain([None], ahead._blocks)
        assert ahead.take(records[0].name, records[0].size) is not None
        ahead.close()


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
def test_a_forked_child_leaves_the_reads_to_its_parent(
    path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine not in [one.name for one in survey() if one.missing is None]:
        pytest.skip("no such engine here")
    monkeypatch.setattr(prefetch_module, "LOOK_AHEAD", MIB)
    monkeypatch.setattr(prefetch_module, "READ_TOGETHER", MIB)
    data = path.read_bytes()
    with opened(path, engine=engine, direct=False, block_size=65536) as (ahead, records):
        child = os.fork()
        if not child:
            last = list(records.values())[-2]
            os._exit(ahead.take(last.name, last.size) is not None)
        assert os.waitpid(child, 0)[1] == 0
        for record in records.values():
            storage = ahead.take(record.name, record.size)
            assert storage is not None
            assert content(storage) == data[record.data_offset : record.data_end]


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
