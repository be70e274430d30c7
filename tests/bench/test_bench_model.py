"""`bench tensor`, `bench model`, `bench scaling`: their data, their rows, what they write."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import os
import signal
import sys
from dataclasses import replace
from multiprocessing import Pipe, forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import fastserial
from fastserial.bench.cli import output
from fastserial.bench.cli.output import Outputs
from fastserial.bench.measuring import rotation
from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.identical import different_tensors
from fastserial.bench.measuring.measure import Sample
from fastserial.bench.measuring.rotation import Measured, Plan, rotate
from fastserial.bench.measuring.rows import DURABLE, LOOSE, Row
from fastserial.bench.measuring.summary import summarize
from fastserial.bench.presenting.plot import check_plot
from fastserial.bench.presenting.scaling_view import scaling_cells
from fastserial.bench.studies import fresh_load, load, scaling
from fastserial.bench.studies.fresh_load import Task
from fastserial.bench.studies.model import Method, run_tensor
from fastserial.bench.studies.scaling import ScalingBench, run_scaling, sizes, steps
from fastserial.bench.subjects import payload, peers
from fastserial.bench.subjects import readers as subjects_readers
from fastserial.bench.subjects.contents import tensors_of, unshared, zip_holds
from fastserial.bench.subjects.model_state import ModelRecipe, model_state
from fastserial.bench.subjects.models import meta_module
from fastserial.bench.subjects.payload import equal_state, fill
from fastserial.bench.subjects.peers import engine_rows, peer_rows
from fastserial.bench.subjects.readers import Files, readers, shapes_of
from fastserial.bench.subjects.torch_rows import stock_row
from fastserial.cli.main import app
from fastserial.engines.null import NullEngine
from fastserial.files.caching import cached_fraction

ONCE = Plan(runs=1, warmups=0, pause=0.0)
MARK = bytes(range(200, 240))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rotation, load):
        monkeypatch.setattr(module, "settle", lambda pause: None)
    monkeypatch.setattr(load, "_TAKEN_BACK", 0.0)


def need(package: str) -> Any:
    return pytest.importorskip(package, reason=f"{package} is an extra: fastserial[bench,plot]")


def invoke(*words: str) -> Any:
    return CliRunner().invoke(app, ["bench", *words])


def marked() -> dict[str, torch.Tensor]:
    """Return tensors, one of which holds bytes that can be found in a file."""
    data = torch.frombuffer(bytearray(MARK * 100), dtype=torch.uint8)
    return {"a.weight": torch.rand(1000), "b": data, "empty": torch.empty(0, 3)}


def damage(path: Path) -> None:
    files = [path] if path.is_file() else sorted(path.glob("*.distcp"))
    for file in files:
        found = file.read_bytes()
        assert MARK in found
        file.write_bytes(found.replace(MARK, bytes(len(MARK)), 1))


# --- data -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (7, 5), (0, 4), (1001,)])
def test_fill(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    fill(tensor, torch.Generator().manual_seed(1))
    raw = tensor.view(-1).view(torch.uint8)
    assert raw.numel() == tensor.nbytes
    if raw.numel() > 1000:
        assert raw.unique().numel() > 200
        assert raw[-8:].any()


def test_equal_state() -> None:
    state = equal_state(1 << 20, 100)
    assert len(state) == 100
    assert len({tensor.untyped_storage().data_ptr() for tensor in state.values()}) == 100
    assert sum(tensor.untyped_storage().nbytes() for tensor in state.values()) == pytest.approx(
        1 << 20, rel=0.01
    )
    assert {tensor.nbytes for tensor in equal_state(8, 1000).values()} == {8}


def test_tensors_have_names_and_are_kept_once() -> None:
    weight = torch.rand(3)
    state = {"model": {"a": weight, "tied": weight.view(3, 1)}, "steps": [torch.ones(()), 7]}
    assert list(tensors_of(state)) == ["model.a", "model.tied", "steps.0"]
    assert list(unshared(state)) == ["model.a", "steps.0"]


def test_model_state() -> None:
    need("transformers")
    state = model_state(ModelRecipe("gpt2-tiny"))
    assert state["lm_head.weight"] is state["transformer.wte.weight"]  # tied in GPT-2
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert state["transformer.wte.weight"].unique().numel() > 1000
    again = model_state(ModelRecipe("gpt2-tiny"))
    assert different_tensors(state, again) == []


def test_model_state_is_that_of_the_model() -> None:
    need("transformers")
    from fastserial.bench.subjects.models import build_module

    module, _ = build_module("gpt2-tiny")
    optimizer = torch.optim.Adam(module.parameters(), foreach=False)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = model_state(ModelRecipe("gpt2-tiny", optimizer=True, half=True))
    module.half().load_state_dict(state["model"])
    theirs, ours = optimizer.state_dict()["state"], state["optimizer"]["state"]
    assert list(ours) == list(theirs)
    for index, states in theirs.items():
        assert {key: (t.shape, t.dtype) for key, t in ours[index].items()} == {
            key: (t.shape, t.dtype) for key, t in states.items()
        }


def test_models_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    need("transformers")
    monkeypatch.setattr(payload, "meminfo", lambda: {"MemAvailable": 8 << 30})
    for recipe in (ModelRecipe("phi3"), ModelRecipe("llama3-1b", optimizer=True)):
        with pytest.raises(BenchError, match="--half, or leave out --optimizer"):
            model_state(recipe)


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BenchError, match="no CUDA device"):
        run_tensor(1000, True, Method(tmp_path))
    with pytest.raises(BenchError, match="no CUDA device"):
        model_state(ModelRecipe("gpt2-tiny", gpu=True))
    assert list(tmp_path.iterdir()) == []


# --- rows -------------------------------------------------------------------------------------


def test_directories_and_contents_are_checked(tmp_path: Path) -> None:
    def run(path: Path) -> Sample:
        path.mkdir()
        (path / "file").write_bytes(b"x")
        return Sample(1, 1.0, 1.0)

    turns: list[int] = []

    def check_last(path: Path) -> bool:
        turns.append(len(turns))
        return len(turns) == 1 and (path / "file").exists()

    rows = [
        Row("right", DURABLE, run, check=lambda path: (path / "file").exists()),
        Row("wrong in the last round", DURABLE, run, check=check_last),
        Row("unchecked", DURABLE, run),
    ]
    measured = rotate(rows, tmp_path, Plan(runs=3, warmups=1, pause=0.0))
    assert [one.equal for one in measured] == [True, False, None]
    assert turns == [0, 1]
    assert [line.right for line in summarize(measured)] == [True, False, True]
    assert list(tmp_path.iterdir()) == []


def test_peers_are_read_back(tmp_path: Path) -> None:
    need("safetensors")
    rows, missing = peer_rows(marked(), ("zip",))
    assert "safetensors" not in missing
    names = {row.name: row for row in rows if "DeepSpeed" not in row.name}
    assert list(names) == [
        "safetensors",
        "safetensors, not durable",
        "DCP FileSystemWriter",
        "DCP FileSystemWriter, not durable",
    ]
    for row in names.values():
        path = tmp_path / "written"
        sample = row.run(path)
        assert row.group == (LOOSE if "not durable" in row.name else DURABLE)
        assert row.stock == "stock zip" + (", not durable" if row.group == LOOSE else "")
        assert sample.nbytes > 8000
        assert row.check is not None
        assert row.check(path)
        damage(path)
        assert not row.check(path)
        rotation._remove(path)


def test_a_peer_that_loses_a_tensor(tmp_path: Path) -> None:
    need("safetensors")
    state = marked()
    less = {name: tensor for name, tensor in state.items() if name != "b"}
    for whole, part in zip(
        peer_rows(state, ("zip",), loose=False)[0],
        peer_rows(less, ("zip",), loose=False)[0],
        strict=True,
    ):
        part.run(tmp_path / part.name)
        assert part.check is not None
        assert whole.check is not None
        assert part.check(tmp_path / part.name)
        assert not whole.check(tmp_path / part.name)


def test_stock_is_read_back(tmp_path: Path) -> None:
    state = {"model": marked(), "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "lr": 0.1}}
    path = tmp_path / "file.pt"
    row = stock_row(state, "zip", crc=False)
    row.run(path)
    assert row.check is not None
    assert row.check(path)
    assert not zip_holds({**state, "more": torch.ones(1)}, path)
    damage(path)
    assert not row.check(path)


def test_missing_peers_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    rows, missing = peer_rows(marked(), ("zip",))
    assert [row.name for row in rows if "DeepSpeed" not in row.name] == []
    assert missing["safetensors"] == "not installed: pip install safetensors"
    assert "pip install" in missing["DCP FileSystemWriter"]


def test_every_engine_has_a_row(tmp_path: Path) -> None:
    state = marked()
    with fastserial.options(engine=NullEngine):
        rows, missing = engine_rows(state, ("zip", "legacy"))
        names = [row.name for row in rows]
        assert names[:2] == ["fastserial zip, engine threads", "fastserial legacy, engine threads"]
        for engine in ("io_uring", "deepspeed"):  # some machines have none
            assert (f"engine {engine}" in missing) != (f"fastserial zip, engine {engine}" in names)
        # the engine is the one of the row: with that of the options the file would be empty
        measured = rotate([stock_row(state, "zip"), rows[0]], tmp_path, ONCE)
        assert measured[1].identical
    rows, _ = engine_rows(marked(), ("zip",))
    assert not any("threads" in row.name for row in rows)


# --- the commands -----------------------------------------------------------------------------


def test_bench_tensor(tmp_path: Path) -> None:
    need("safetensors")
    folder, results = tmp_path / "disk", tmp_path / "results"
    folder.mkdir()
    results.mkdir()
    files = [f"--{kind}={results / f'out.{kind}'}" for kind in ("json", "csv")]
    words = ["--size", "2MiB", "--runs", "2", "--no-fio", "--lines", *files]
    done = invoke("tensor", "--folder", str(folder), *words)
    assert done.exit_code == 0, done.output
    assert list(folder.iterdir()) == []
    found = json.loads((results / "out.json").read_text())
    assert "without fio: switched off" in done.output
    jobs = {job["jobname"]: job for job in found["jobs"]}
    expected = [f"{who} {one}" for who in ("stock", "fastserial") for one in ("zip", "legacy")]
    expected += ["stock zip, CRC off", "safetensors", "DCP FileSystemWriter"]
    for name in expected:
        assert f"{name}: WRITE: bw=" in done.output
        assert jobs[name]["group"] == "durable"
        assert jobs[name]["ratio_to_stock"]["median"] > 0
        assert jobs[name]["write"]["io_bytes"] >= 2 << 20
        assert len(jobs[name]["runs"]) == 2
        assert name == "stock zip, CRC off" or f"{name}, not durable" in jobs
    checked = {name for name, job in jobs.items() if job["identical"] or job["equal"]}
    assert set(jobs) - checked == {
        "stock legacy",
        "stock legacy, not durable",
        "fastserial zip, null engine",
        "fastserial legacy, null engine",
    }
    with (results / "out.csv").open(newline="") as file:
        cells = {row["name"]: row for row in csv.DictReader(file)}
    assert list(cells) == list(jobs)
    seconds = jobs["safetensors"]["seconds"]["median"]
    assert float(cells["safetensors"]["seconds"]) == pytest.approx(seconds)
    assert cells["stock zip"]["ratio_to_fio"] == ""


def test_json_is_shaped_as_fio_s(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    words = ["--size", "12MiB", "--runs", "1", "--no-fio", "--no-peers", "--no-loose"]
    done = invoke("tensor", "--folder", str(tmp_path), *words, "--no-legacy", f"--json={target}")
    assert done.exit_code == 0, done.output
    found = json.loads(target.read_text())
    jobs = {job["jobname"]: job for job in found["jobs"]}
    assert list(jobs) == ["stock zip", "stock zip, CRC off", "fastserial zip"]
    written = jobs["fastserial zip"]["write"]
    seconds = jobs["fastserial zip"]["seconds"]["median"]
    assert written["runtime"] == round(seconds * 1000)
    assert written["bw_bytes"] == pytest.approx(written["io_bytes"] / seconds, abs=1)
    assert written["bw"] == pytest.approx(written["bw_bytes"] / 1024, abs=1)
    assert written["iops"] == pytest.approx(written["total_ios"] / seconds)
    percentiles = written["clat_ns"]["percentile"]
    assert 0 < percentiles["50.000000"] <= percentiles["99.000000"]
    assert {"timestamp", "time"} <= set(found)


def test_bench_model(tmp_path: Path) -> None:
    need("transformers")
    target = tmp_path / "out.json"
    words = ["--model", "gpt2-tiny", "--half", "--optimizer", "--legacy", "--no-loose", "--no-fio"]
    done = invoke("model", "--folder", str(tmp_path), "--runs", "1", *words, f"--json={target}")
    assert done.exit_code == 0, done.output
    assert "gpt2-tiny, float16 weights, Adam's states in float32" in done.output
    jobs = {job["jobname"]: job for job in json.loads(target.read_text())["jobs"]}
    assert {"stock legacy", "fastserial legacy"} <= set(jobs)
    assert not any("zip" in name for name in jobs)
    assert jobs["fastserial legacy"]["identical"]
    assert all(job["equal"] for job in jobs.values() if job["equal"] is not None)
    assert jobs["DCP FileSystemWriter"]["ratio_to_stock"]["median"] > 0


def test_unknown_model(tmp_path: Path) -> None:
    need("transformers")
    done = invoke("model", "--model", "gpt9", "--folder", str(tmp_path))
    assert isinstance(done.exception, BenchError)
    assert "llama3-1b" in str(done.exception)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("[]", "cannot read"),
        ('{"model_type": "gpt99"}', "cannot read"),
        ('{"model_type": "vit"}', "a causal language model"),
    ],
)
def test_a_config_that_is_none(tmp_path: Path, text: str | None, message: str) -> None:
    need("transformers")
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(BenchError, match=message) as caught:
        meta_module(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_content_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("safetensors")
    monkeypatch.setattr(peers, "_safetensors_holds", lambda tensors, path: False)
    words = ["--size", "4096", "--runs", "1", "--no-fio", "--no-loose"]
    done = invoke("tensor", "--folder", str(tmp_path), *words)
    assert done.exit_code == 1
    assert "WRONG" in done.output


def test_bench_load_outputs(tmp_path: Path) -> None:
    need("safetensors")
    words = ["--size", "12MiB", "--tensors", "5", "--runs", "1"]
    words += ["--no-small", "--no-fio", "--lines", "--temperature=cold", "--temperature=warm"]
    files = [f"--json={tmp_path / 'out.json'}", f"--csv={tmp_path / 'out.csv'}"]
    done = invoke("load", "--folder", str(tmp_path), *words, *files)
    assert done.exit_code == 0, done.output
    assert "fastserial zip, cold: READ: bw=" in done.output
    jobs = json.loads((tmp_path / "out.json").read_text())["jobs"]
    ours = next(job for job in jobs if job["jobname"] == "fastserial zip")
    assert ours["equal"]
    assert ours["read"]["clat_ns"]["N"] == ours["read"]["total_ios"] > 0
    with (tmp_path / "out.csv").open(newline="") as file:
        names = {row["name"] for row in csv.DictReader(file)}
    assert {"stock zip, cold", "stock zip, warm", "fastserial zip, cold"} <= names
    assert not any("fresh" in name for name in names)


def test_loads_to_a_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By the host, which readers are made to take for a device."""
    monkeypatch.setattr(subjects_readers, "HOST", "host")
    state = marked()
    files = Files(tmp_path / "a.pt", tmp_path / "b.pt", None, None)
    torch.save(state, files.zip)
    torch.save(state, files.legacy, _use_new_zipfile_serialization=False)
    if importlib.util.find_spec("safetensors") is not None:
        files = replace(files, safetensors=tmp_path / "c.safetensors")
        importlib.import_module("safetensors.torch").save_file(state, files.safetensors)
    found, _ = readers(files, shapes_of(state), "cpu")
    names = [reader.name for reader in found]
    assert {"stock zip", "fastserial zip", "fastserial legacy"} <= set(names)
    assert "fastserial zip, small pages" not in names
    for reader in found:
        with reader.context():
            loaded = reader.load(reader.prepare())
        assert loaded.keys() == state.keys(), reader.name
        assert all(torch.equal(loaded[name], state[name]) for name in state), reader.name


def test_bench_load_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = invoke("load", "--folder", str(tmp_path), "--gpu", "--size", "1MiB")
    assert isinstance(done.exception, BenchError)
    assert "finds no CUDA device" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_every_load_begins_with_the_same_page_cache(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.pt", "b.pt")]
    for path in paths:
        path.write_bytes(os.urandom(1 << 20))
    saved = load._Saved(Files(*paths, None, None), {}, 4096, {})

    def cached() -> list[float | None]:
        return [load_cached(path) for path in paths]

    for turn in range(2):  # whatever the row before has left
        load._prepare((paths[turn],), "warm", saved, 0.0)
        assert cached() == [1.0 - turn, 0.0 + turn]
        load._prepare((paths[turn],), "cold", saved, 0.0)
        assert cached() == [0.0, 0.0]


def test_every_load_begins_with_memory_in_the_same_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"bytes")
    saved = load._Saved(Files(path, path, None, None), {}, 1 << 20, {})
    touched: list[int] = []
    slept: list[float] = []
    monkeypatch.setattr(load, "fetch_free_memory", touched.append)
    monkeypatch.setattr(load.time, "sleep", slept.append)
    for temperature in ("warm", "cold"):
        load._prepare((path,), temperature, saved, 0.0)
    assert touched == [16 << 20] * 2
    assert load._TAKEN_BACK not in slept
    load._prepare((path,), load._FRESH, saved, 0.0)
    assert len(touched) == 2
    assert load._TAKEN_BACK in slept


def load_cached(path: Path) -> float | None:
    with path.open("rb") as file:
        return cached_fraction(file.fileno(), 0, path.stat().st_size)


@pytest.mark.parametrize("silence", [0.0, 1000.0])
def test_progress_without_a_terminal(
    silence: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_SILENCE", silence)
    with output.progress(Console(force_terminal=False)) as show:
        show("round 1/5: stock [zip]")
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "" if silence else "round 1/5: stock [zip]\n")


def test_processes_that_load_leave_ctrl_c_to_the_parent(tmp_path: Path) -> None:
    fresh_load._start_server()
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    status = Path(f"/proc/{server}/status").read_text()
    ignored = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn"))
    assert int(ignored, 16) >> (signal.SIGINT - 1) & 1
    ours, theirs = Pipe(duplex=False)
    ours.close()  # the parent is gone
    nothing = tmp_path / "nothing"
    fresh_load._serve(Task("no such row", Files(nothing, nothing, None, None), {}), theirs)


# --- scaling ----------------------------------------------------------------------------------


def test_steps() -> None:
    assert steps(200_000) == [1, 10, 100, 1000, 10_000, 100_000, 200_000]
    assert steps(1) == [1]
    assert sizes(1 << 20) == [1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20]
    assert sizes(700) == [700]


def test_scaling_compares_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("safetensors")
    plans: list[int] = []

    def spy(rows: Any, folder: Path, plan: Plan, say: Any) -> list[Measured]:
        plans.append(plan.runs)
        return rotate(rows, folder, plan, say)

    monkeypatch.setattr(scaling, "rotate", spy)
    monkeypatch.setattr(scaling, "_QUICK", 10 << 10)
    bench = ScalingBench(tmp_path, 16 << 10, 10, 8 << 10, runs=1, pause=0.0)
    result = run_scaling(bench)
    assert list(tmp_path.iterdir()) == []
    assert result.right
    assert plans == [4, 4, 1, 4, 4]
    assert [point.tensors for point in result.points] == [16] * 3 + [1, 10]
    for point in result.points:
        names = [line.name for line in point.lines]
        assert names == ["stock zip", "fastserial zip", "safetensors"]
        assert all(line.nbytes == point.nbytes for line in point.lines)
        assert all(line.identical or line.equal for line in point.lines)
        for base, mine in zip(point.lines[0].samples, point.lines[1].samples, strict=True):
            ratio = point.lines[1].to_stock
            assert ratio is not None
            assert ratio.low <= base.seconds / mine.seconds * (1 + 1e-9)
    cells = list(scaling_cells(result))
    assert len(cells) == 15
    assert {row["axis"] for row in cells} == {"size", "tensors"}


# --- plots ------------------------------------------------------------------------------------


def is_png(path: Path) -> bool:
    return path.read_bytes()[:4] == b"\x89PNG" and path.stat().st_size > 10_000


def test_plot_of_a_run(tmp_path: Path) -> None:
    need("matplotlib")
    target = tmp_path / "out.PNG"
    words = ["--size", "64KiB", "--runs", "1", "--no-fio", "--no-peers", f"--plot={target}"]
    done = invoke("tensor", "--folder", str(tmp_path), *words)
    assert done.exit_code == 0, done.output
    assert is_png(target)


def test_plots_of_scaling(tmp_path: Path) -> None:
    need("matplotlib")
    words = ["--max-size", "2KiB", "--max-tensors", "2", "--total", "4096", "--runs", "1"]
    done = invoke("scaling", "--folder", str(tmp_path), *words, f"--plot={tmp_path / 'curve'}")
    assert done.exit_code == 0, done.output
    assert is_png(tmp_path / "curve-size.png")
    assert is_png(tmp_path / "curve-tensors.png")
    with (tmp_path / "curve.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    counts = [int(row["tensors"]) for row in rows if row["axis"] == "tensors"]
    assert sorted(set(counts)) == [1, 2]


def test_planning_for_many_ranks(tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    words = ["--ranks", "64", "--tensors", "300", "--tensor-parallel", "4", "--stages", "4"]
    done = invoke("plan", *words, "--every", "32", "--writers", "8", "--json", str(out))
    assert done.exit_code == 0, done.output
    assert "64 ranks: 4 stages of 4 (FSDP) x 4" in done.output
    found = json.loads(out.read_text())
    assert [plan["rank"] for plan in found["ranks"]] == [0, 32, 63]
    assert [bool(plan["written"]) for plan in found["ranks"]] == [True, True, False]
    done = invoke("plan", "--ranks", "100")
    assert isinstance(done.exception, BenchError)


def test_plots_need_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for command in ("tensor", "save", "model", "load", "scaling"):
        done = invoke(command, "--folder", str(tmp_path), f"--plot={tmp_path / 'out.png'}")
        assert isinstance(done.exception, BenchError)
        assert "pip install matplotlib" in str(done.exception)


def test_outputs_are_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BenchError, match="create it first"):
        Outputs(json_file=tmp_path / "missing" / "out.json").check()
    with pytest.raises(BenchError, match="is a directory"):
        Outputs(csv_file=tmp_path).check()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root
    with pytest.raises(BenchError, match=r"out\.csv cannot be written"):
        Outputs(csv_file=tmp_path / "out.csv").check()
    monkeypatch.undo()
    need("matplotlib")
    with pytest.raises(BenchError, match=r"end it in .*\.png"):
        check_plot(tmp_path / "out.xyz")
