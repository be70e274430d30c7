"""`fastserial bench profile`: times that add up, and a trace that opens."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fastserial
from fastserial import trace
from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.studies import profile
from fastserial.bench.studies.profile import ProfileBench, ProfileResult, run_profile
from fastserial.bench.studies.spans import as_trace, self_seconds, spans_of
from fastserial.cli.main import app
from fastserial.engines import threads
from fastserial.saving import fill
from fastserial.trace import IN_FLIGHT, Event

MiB = 1 << 20


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "settle", lambda pause: None)


# --- spans ------------------------------------------------------------------------------------

# what is told in the order in which it ends, or later
EVENTS = [
    Event("inner", 7, 2.0, 4.0),
    Event("innermost", 7, 6.0, 7.0),
    Event("inner", 7, 5.0, 8.0),
    Event("work", 8, 3.0, 6.0),
    Event(IN_FLIGHT, 0, 1.5, 6.0),
    Event("outer", 7, 1.0, 10.0),
    Event("after", 7, 10.0, 11.0),
    Event("work", 9, 6.5, 7.0),
    Event(IN_FLIGHT, 0, 6.0, 7.0),
]


def test_own_time_leaves_out_what_is_inside() -> None:
    spans = spans_of(EVENTS)
    mine = [span for span in spans if span.event.thread == 7]
    assert self_seconds(mine) == {
        "outer": (4.0, 1),
        "inner": (4.0, 2),
        "innermost": (1.0, 1),
        "after": (1.0, 1),
    }
    assert sum(span.own for span in mine) == 10.0
    assert self_seconds(spans)["work"] == (3.5, 2)


def test_one_track_per_thread() -> None:
    events = as_trace(EVENTS, 1.0, 7)["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {1: "saving thread", 2: "engine thread 1", 3: "engine thread 2"}
    spans = [event for event in events if event["ph"] == "X"]
    assert [(e["tid"], e["ts"], e["dur"]) for e in spans if e["name"] == "work"] == [
        (2, 2e6, 3e6), (3, 5.5e6, 0.5e6),
    ]  # fmt: skip
    assert len(spans) == len(EVENTS) - 2
    levels = [event["args"]["blocks in flight"] for event in events if event["ph"] == "C"]
    assert levels == [1, 0, 1, 0]


# --- what is measured -------------------------------------------------------------------------


def test_slow_steps_show_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile measures: what is made slow is what gets long."""
    fsync, crc32 = os.fsync, fill.crc32

    def slow_fsync(fd: int) -> None:
        time.sleep(0.12 if stat.S_ISDIR(os.fstat(fd).st_mode) else 0.11)
        fsync(fd)

    def slow_crc32(*arguments: Any) -> int:
        time.sleep(0.005)
        return crc32(*arguments)

    monkeypatch.setattr(os, "fsync", slow_fsync)
    monkeypatch.setattr(fill, "crc32", slow_crc32)
    result = profiled(tmp_path, runs=1)
    caller = {phase.name: phase for phase in result.caller}
    assert (caller["fsync"].seconds >= 0.11, caller["fsync"].count) == (True, 1)
    assert (caller["directory sync"].seconds >= 0.12, caller["directory sync"].count) == (True, 1)
    phases = (*result.caller, *result.workers)
    found = [(phase.seconds, phase.count) for phase in phases if phase.name == "CRC-32"]
    seconds, chunks = (sum(column) for column in zip(*found, strict=True))
    assert seconds >= 0.005 * chunks
    assert chunks >= 16 * 4


def test_nobody_listens_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **keywords: Any) -> None:
        assert trace.listener is not None
        raise KeyError

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(KeyError):
        profile._profiled({}, tmp_path / "file", "zip")
    assert trace.listener is None


# --- whole profiles ---------------------------------------------------------------------------


def profiled(folder: Path, **more: Any) -> ProfileResult:
    return run_profile(ProfileBench(folder, 16 * MiB, 12, pause=0, **more))


@pytest.mark.parametrize("few_cores", [True, False])
@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_profile(
    tmp_path: Path, container: str, few_cores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "FEW_CORES", 1 << 20 if few_cores else 0)
    result = profiled(tmp_path, container=container, runs=2)
    assert result.identical
    assert list(tmp_path.iterdir()) == []
    assert not fastserial.installed()
    assert sum(phase.seconds for phase in result.caller) == pytest.approx(result.seconds)
    assert sum(phase.share for phase in result.caller) == pytest.approx(1)
    assert sum(phase.share for phase in result.workers) == pytest.approx(1)
    caller = {phase.name: phase for phase in result.caller}
    steps = {"open target", "pickle", "layout", "preallocate", "cut into blocks", "submit"}
    steps |= {"wait for blocks", "fsync", "rename", "directory sync", "other"}
    assert steps <= set(caller)
    workers = {phase.name: phase for phase in result.workers}
    assert {"device write", "idle"} <= set(workers)
    fillers = caller if few_cores else workers
    assert "copy" in fillers
    assert ("CRC-32" in fillers) is (container == "zip")
    blocks = -(-result.report.bytes // result.report.block_size)
    assert workers["device write"].count == pytest.approx(blocks, abs=1)
    assert 1 <= result.worker_count <= result.report.threads


def test_trace_of_a_save(tmp_path: Path) -> None:
    trace = json.loads(json.dumps(profiled(tmp_path, runs=1).trace))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    whole = next(event for event in spans if event["name"] == "torch.save")
    assert whole["ts"] == 0
    assert all(event["ts"] + event["dur"] <= whole["dur"] + 1 for event in spans)
    for track in {event["tid"] for event in spans}:  # spans of one thread nest, as the viewer wants
        ends: list[float] = []
        for event in (event for event in spans if event["tid"] == track):
            while ends and ends[-1] <= event["ts"] + 0.01:
                ends.pop()
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 0.01
            ends.append(event["ts"] + event["dur"])
    levels = [event["args"] for event in trace["traceEvents"] if event["ph"] == "C"]
    assert levels[-1] == {"blocks in flight": 0}
    assert max(level["blocks in flight"] for level in levels) <= 6


def test_one_plain_write_has_no_workers(tmp_path: Path) -> None:
    result = run_profile(ProfileBench(tmp_path, 1000, 2, 1, pause=0))
    assert result.report.engine == "buffered"
    assert result.workers == ()
    assert result.identical


def test_a_file_that_differs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "digest", lambda path: path.name)
    words = ["bench", "profile", "--folder", str(tmp_path), "--size", "2MiB", "--runs", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert "identical to stock torch's file: NO" in done.output


def test_command(tmp_path: Path) -> None:
    folder, trace, found = tmp_path / "disk", tmp_path / "trace.json", tmp_path / "profile.json"
    folder.mkdir()
    words = ["--size", "12MiB", "--tensors", "5", "--runs", "1", "--legacy"]
    outputs = ["--trace", str(trace), "--json", str(found)]
    done = CliRunner().invoke(app, ["bench", "profile", "--folder", str(folder), *words, *outputs])
    assert done.exit_code == 0, done.output
    for word in ("wall clock", "thread time", "fsync", "device write", "identical", "yes"):
        assert word in done.output
    assert json.loads(trace.read_text())["traceEvents"]
    content = json.loads(found.read_text())
    assert content["bench"]["container"] == "legacy"
    assert sum(phase["share"] for phase in content["caller"]) == pytest.approx(1)
    assert list(folder.iterdir()) == []


def test_what_cannot_be_profiled(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(BenchError, match="no device"):
            profiled(tmp_path, device="cuda")
    assert list(tmp_path.iterdir()) == []
