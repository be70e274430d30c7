"""`fastserial bench profile`: times that add up, a trace that opens, hooks that leave no trace."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import fastserial
from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.studies import instrument, profile
from fastserial.bench.studies.instrument import instrumented, recording_pickle
from fastserial.bench.studies.profile import ProfileBench, ProfileResult, run_profile
from fastserial.bench.studies.spans import Recorder, as_trace, self_seconds
from fastserial.cli.main import app
from fastserial.engines import threads

MiB = 1 << 20


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "settle", lambda pause: None)


# --- spans ------------------------------------------------------------------------------------


def test_own_time_leaves_out_what_is_inside() -> None:
    recorder = Recorder()

    def outer() -> str:
        time.sleep(0.02)
        recorder.call("inner", time.sleep, 0.05)
        recorder.call("inner", time.sleep, 0.05)
        return "result"

    assert recorder.call("outer", outer) == "result"
    first, _, whole = recorder.spans
    found = self_seconds(recorder.spans)
    assert list(found) == ["outer", "inner"]
    assert found["inner"][1] == 2
    assert found["inner"][0] >= 0.1
    assert found["outer"][0] == pytest.approx(whole.seconds - found["inner"][0])
    assert whole.start < first.start < first.end < whole.end


def test_a_call_that_raises_is_recorded() -> None:
    recorder = Recorder()
    with pytest.raises(ZeroDivisionError):
        recorder.wrap("divide", lambda: 1 / 0)()
    recorder.call("after", lambda: None)
    assert [span.name for span in recorder.spans] == ["divide", "after"]
    assert all(span.own == span.seconds for span in recorder.spans)


def test_one_track_per_thread() -> None:
    recorder = Recorder()
    together = threading.Barrier(3)  # the identifier of a thread that has ended is given out again

    def work() -> None:
        recorder.call("work", together.wait)

    def main() -> None:
        threads = [threading.Thread(target=work, name=f"helper-{i}") for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    recorder.call("main", main)
    recorder.levels.append((recorder.spans[-1].end, 2))
    events = as_trace(recorder, recorder.spans[-1].start, "level")["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {"helper-0", "helper-1", "helper-2"} < set(names.values())
    assert sorted(names[e["tid"]] for e in spans if e["name"] == "work") == [
        "helper-0", "helper-1", "helper-2",
    ]  # fmt: skip
    assert [event["args"] for event in events if event["ph"] == "C"] == [{"level": 2}]
    assert min(event["ts"] for event in spans) == 0
    assert all(event["dur"] >= 0 for event in spans)


# --- the hooks --------------------------------------------------------------------------------


def test_hooks_are_taken_away_after_an_error() -> None:
    before = [getattr(owner, name) for owner, name, _ in instrument._STEPS]
    create = instrument.block_writer.create
    with pytest.raises(KeyError), instrumented(Recorder()):
        assert instrument.block_writer.create is not create
        assert [getattr(owner, name) for owner, name, _ in instrument._STEPS] != before
        raise KeyError
    assert [getattr(owner, name) for owner, name, _ in instrument._STEPS] == before
    assert instrument.block_writer.create is create


def test_pickle_module_records(tmp_path: Path) -> None:
    recorder = Recorder()
    torch.save({"a": torch.zeros(3)}, tmp_path / "a.pt", recording_pickle(recorder))
    assert [span.name for span in recorder.spans] == ["pickle"]
    assert torch.equal(torch.load(tmp_path / "a.pt")["a"], torch.zeros(3))


def test_slow_steps_show_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile measures: what is made slow is what gets long."""

    def slow(owner: Any, name: str, seconds: float) -> None:
        function = getattr(owner, name)

        def slower(*args: Any, **keywords: Any) -> Any:
            time.sleep(seconds)
            return function(*args, **keywords)

        monkeypatch.setattr(owner, name, slower)

    from fastserial.files import linux, replacement
    from fastserial.saving import fill

    slow(replacement.Replacement, "sync", 0.11)
    slow(replacement.Replacement, "_sync_directory", 0.12)
    slow(linux, "preallocate", 0.13)
    slow(fill, "crc32", 0.005)
    result = profiled(tmp_path, runs=1)
    caller = {phase.name: phase.seconds for phase in result.caller}
    assert caller["fsync"] >= 0.11
    assert caller["directory sync"] >= 0.12
    assert caller["preallocate"] >= 0.13
    assert sum(caller.values()) == pytest.approx(result.seconds)  # each in one place only
    phases = (*result.caller, *result.workers)
    found = [(phase.seconds, phase.count) for phase in phases if phase.name == "CRC-32"]
    seconds, chunks = (sum(column) for column in zip(*found, strict=True))
    assert seconds >= 0.005 * chunks
    assert chunks >= 16 * 4


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
    blocks = -(-result.report.bytes // result.settings.block_size)
    assert workers["device write"].count == pytest.approx(blocks, abs=1)
    assert 1 <= result.worker_count <= result.settings.threads


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
    with fastserial.options(engine="null"), pytest.raises(BenchError, match="writes no data"):
        profiled(tmp_path)
    if not torch.cuda.is_available():
        with pytest.raises(BenchError, match="no device"):
            profiled(tmp_path, device="cuda")
    assert list(tmp_path.iterdir()) == []
