"""The handle of a save beside the program: what it tells, and that no error is lost."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import io
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.beside import Gate
from support.corpus import CASES
from support.identity import stock
from support.limits import file_size_limit
from support.processes import run

import fastserial
from fastserial.engines.threads import ThreadsEngine
from fastserial.overlap import asynchronous, pending
from fastserial.reports import SAVES


def bytes_of(obj: Any, folder: Path, name: str = "state.pt") -> bytes:
    """What stock torch writes under that name."""
    path = folder / "stock" / name
    path.parent.mkdir(exist_ok=True)
    with stock():
        torch.save(obj, path)
    return path.read_bytes()


@pytest.mark.parametrize("budget", [None, 0, 500_000])
@pytest.mark.parametrize("small_file", [0, 8 << 20])
def test_the_file_is_the_one_that_torch_writes(
    tmp_path: Path, state: Any, budget: int | None, small_file: int
) -> None:
    path = tmp_path / "state.pt"
    with fastserial.options(small_file=small_file, block_size=65536):
        saving = fastserial.save_async(state, path, snapshot_budget=budget)
        report = saving.wait()
    assert path.read_bytes() == bytes_of(state, tmp_path)
    assert saving.done()
    assert saving.exception() is None
    assert saving.report is report
    assert fastserial.last_save_report() is report
    assert report.path == str(path)
    assert report.bytes == path.stat().st_size
    assert report.snapshot is not None
    assert report.snapshot.kind == ("copy" if budget is None else "blocking")
    assert 0 < report.snapshot.stall <= report.seconds + report.snapshot.stall


ODD = "module views sparse quantized storage_untyped nested_jagged empty_between_data meta_tensors"


@pytest.mark.parametrize("budget", [None, 0])
@pytest.mark.parametrize("name", ODD.split())
@pytest.mark.filterwarnings("ignore")
def test_tensors_of_every_kind(tmp_path: Path, name: str, budget: int | None) -> None:
    obj = [CASES[name].build(), torch.randn(40_000)]
    fastserial.save_async(obj, tmp_path / "state.pt", snapshot_budget=budget).wait()
    assert (tmp_path / "state.pt").read_bytes() == bytes_of(obj, tmp_path)


def test_it_returns_before_the_file_is_there(tmp_path: Path, state: Any, gate: Gate) -> None:
    path = tmp_path / "state.pt"
    saving = fastserial.save_async(state, path)
    assert gate.stopped.wait(60)
    assert not saving.done()
    assert saving.report is None
    assert not path.exists()
    with pytest.raises(TimeoutError, match=r"state\.pt"):
        saving.wait(0.01)
    with pytest.raises(TimeoutError):
        saving.exception(timeout=0)
    gate.open.set()
    saving.wait(60)
    assert path.exists()


def test_a_copy_may_be_changed_at_once(tmp_path: Path, state: Any, gate: Gate) -> None:
    expected = bytes_of(state, tmp_path)
    saving = fastserial.save_async(state, tmp_path / "state.pt")
    for tensor in (*state["weights"], *state["small"]):
        tensor.fill_(1)
    state["step"] = 4
    gate.open.set()
    saving.wait()
    assert (tmp_path / "state.pt").read_bytes() == expected


def test_saves_to_one_target_come_in_order(tmp_path: Path, gate: Gate) -> None:
    gate.open.set()
    path = tmp_path / "state.pt"
    for number in range(20):
        fastserial.save_async([number, torch.full((70_000,), number)], path)
    fastserial.wait_all()
    assert torch.load(path)[0] == 19


def test_few_are_under_way(tmp_path: Path, state: Any, gate: Gate) -> None:
    saves = [fastserial.save_async(state, tmp_path / f"{n}.pt") for n in range(2)]
    third: list[fastserial.PendingSave] = []

    def save() -> None:
        third.append(fastserial.save_async(state, tmp_path / "2.pt"))

    thread = threading.Thread(target=contextvars.copy_context().run, args=(save,))
    thread.start()
    thread.join(0.2)
    assert not third
    assert not any(saving.done() for saving in saves)
    gate.open.set()
    thread.join(60)
    third[0].wait(60)
    fastserial.wait_all()


def test_what_fails_at_the_call(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(b"old")
    with pytest.raises(Exception, match="pickle"):
        fastserial.save_async([torch.ones(3), lambda: 0], path)
    with pytest.raises(fastserial.WriteError, match="does not exist"):
        fastserial.save_async([1], tmp_path / "none" / "state.pt")
    with pytest.raises(TypeError, match="nonsense"):
        fastserial.save_async([1], path, nonsense=1)
    with pytest.raises(fastserial.ConfigError, match="at least 0"):
        fastserial.save_async([1], path, snapshot_budget=-1)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["state.pt"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """No file can be larger than 1 MiB."""
    with file_size_limit(1 << 20):
        yield tmp_path
        for save in list(pending._pending):
            save.exception(60)


def test_a_full_disk_shows_at_wait(small_disk: Path, state: Any) -> None:
    path = small_disk / "state.pt"
    path.write_bytes(b"old")
    saving = fastserial.save_async(state, path)
    error = saving.exception()
    assert isinstance(error, fastserial.WriteError)
    with pytest.raises(fastserial.WriteError, match=r"state\.pt"):
        saving.wait()
    assert path.read_bytes() == b"old"
    assert os.listdir(small_disk) == ["state.pt"]


def test_an_error_shows_at_the_next_save_to_the_target(small_disk: Path, state: Any) -> None:
    path = small_disk / "state.pt"
    fastserial.save_async(state, path)
    fastserial.save_async([1], small_disk / "other.pt").wait()
    with pytest.raises(fastserial.WriteError):
        fastserial.save_async([1], path)
    fastserial.save_async([2], path).wait()
    assert torch.load(path) == [2]


def test_it_is_a_future(
    tmp_path: Path, state: Any, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    called: list[fastserial.PendingSave] = []

    def fail(saving: fastserial.PendingSave) -> None:
        raise ValueError("mine")

    async def train() -> None:
        saving = fastserial.save_async(state, tmp_path / "state.pt")
        saving.add_done_callback(fail)
        saving.add_done_callback(called.append)
        impatient = asyncio.ensure_future(asyncio.wait_for(saving, 0.01))
        asyncio.get_running_loop().call_later(0.05, gate.open.set)
        report = await saving  # other tasks go on: one opens the gate
        assert called == [saving]
        with pytest.raises(asyncio.TimeoutError):
            await impatient
        assert await saving is saving.result() is report
        saving.add_done_callback(called.append)
        assert called == [saving, saving]

    asyncio.run(train())
    assert "mine" in caplog.text


def test_an_awaited_save_raises_its_error(small_disk: Path, state: Any) -> None:
    async def train() -> None:
        await fastserial.save_async(state, small_disk / "state.pt")

    with pytest.raises(fastserial.WriteError):
        asyncio.run(train())


def test_wait_all_raises_each_error_once(small_disk: Path, state: Any) -> None:
    fastserial.save_async(state, small_disk / "a.pt")
    fastserial.save_async(state, small_disk / "b.pt")
    for name in ("a", "b"):
        with pytest.raises(fastserial.WriteError, match=rf"{name}\.pt"):
            fastserial.wait_all()
    fastserial.wait_all()


def test_an_error_keeps_nothing_alive(small_disk: Path) -> None:
    obj = torch.randn(1_000_000)
    kept = weakref.ref(obj)
    saving = fastserial.save_async(obj, small_disk / "a.pt")
    assert saving.exception() is not None
    del obj
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("end", ["uncaught", "failing"])
def test_the_interpreter_waits_at_its_exit(tmp_path: Path, end: str) -> None:
    path = tmp_path / "state.pt"
    ended = run("leave", path, end, code=1 if end == "uncaught" else 0)
    if end == "failing":
        assert not path.exists()
        assert f"{path}: it was not saved" in ended.err
    else:
        assert torch.load(path)["x"].eq(7).all()


def test_a_forked_child_does_not_wait(tmp_path: Path) -> None:
    assert run("leave", tmp_path / "state.pt", "fork").out.split() == ["child", "saved"]


def test_what_is_saved_before_the_call_returns(tmp_path: Path, state: Any) -> None:
    saving = fastserial.save_async(state, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    assert saving.done()
    report = saving.wait()
    assert report.container == "legacy"
    assert report.snapshot is not None
    assert report.snapshot.kind == "blocking"
    assert report.fallback is not None
    for target in (io.BytesIO(), os.fsencode(tmp_path / "a.pt")):
        with pytest.raises(TypeError, match="path"):
            fastserial.save_async(state, target)  # type: ignore[arg-type]
    fastserial.wait_all()


def test_an_unknown_torch(tmp_path: Path, state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asynchronous, "patched", lambda name: None)
    saving = fastserial.save_async(state, tmp_path / "a.pt")
    state["weights"][0].zero_()
    assert saving.wait().fallback == "this torch stays stock"


def test_a_file_that_cannot_be_replaced_is_saved_at_once(tmp_path: Path, state: Any) -> None:
    path = tmp_path / "state.pt"
    SAVES.clear()
    with path.open("wb"):
        saving = fastserial.save_async(state, path)
        assert saving.done()
    report = saving.wait()
    held = "this process has the file open or locked"
    assert (report.fallback, report.engine, report.durable) == (held, "torch", False)
    assert path.read_bytes() == bytes_of(state, tmp_path)
    (why,) = fastserial.summary().saves.why_torch
    assert (why.count, why.reason) == (1, held)


def test_on_report_gets_the_whole_report_once(
    tmp_path: Path, state: Any, caplog: pytest.LogCaptureFixture
) -> None:
    reports: list[fastserial.SaveReport] = []
    count = fastserial.summary().saves.count
    with fastserial.options(on_report=reports.append), caplog.at_level("DEBUG", "fastserial"):
        report = fastserial.save_async(state, tmp_path / "a.pt").wait()
        at_once = fastserial.save_async(state, tmp_path / "b.pt", snapshot_budget=0).wait()
    assert reports == [report, at_once]
    assert all(one.snapshot is not None for one in reports)
    assert fastserial.summary().saves.count == count + 2
    assert [record.message.startswith("WRITE") for record in caplog.records].count(True) == 2


def test_on_report_may_save(tmp_path: Path, state: Any) -> None:
    made: list[fastserial.PendingSave] = []

    def again(report: fastserial.SaveReport) -> None:
        if not made:
            made.append(fastserial.save_async([1], tmp_path / "a.pt"))
            fastserial.save_async([2], tmp_path / "b.pt").wait()

    with fastserial.options(on_report=again):
        fastserial.save_async(state, tmp_path / "a.pt").wait(60)
    assert torch.load(tmp_path / "a.pt") == [1]
    assert torch.load(tmp_path / "b.pt") == [2]


def test_the_options_of_the_call_count(tmp_path: Path, state: Any) -> None:
    class OtherEngine(ThreadsEngine):
        name = "other"

    with fastserial.options(durable=False, small_file=0, engine=OtherEngine):
        saving = fastserial.save_async(state, tmp_path / "a.pt")
    assert saving.wait().engine == "other"
