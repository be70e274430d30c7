"""Each script of benchmarks/ runs once, with little data, and what it writes makes sense."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastserial.bench import fio

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"
STOCK, OURS = "stock zip", "fastserial zip"
OVERLAP = ["--model", "tiny", "--tokens", "16", "--batch", "1", "--every", "1", "--saves", "1"]


def run(name: str, folder: Path, *words: str, runs: int = 1, status: int = 0) -> dict[str, Any]:
    """Run a script in its short form, with other sizes; return what it wrote as JSON."""
    disk, target = folder / "disk", folder / "out.json"
    disk.mkdir(exist_ok=True)
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), "--folder", str(disk), "--short"]
    command += ["--pause", "0", "--runs", str(runs), "--json", str(target), *words]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=280,
    )
    assert done.returncode == status, (done.stdout, done.stderr)
    assert list(disk.iterdir()) == []
    found: dict[str, Any] = json.loads(target.read_text())
    assert found["command"].startswith(f"{name}.py")
    return found


def rows_of(found: dict[str, Any], table: int = 0) -> dict[str, dict[str, Any]]:
    """Return a table's rows by name; each has run, and none is wrong."""
    rows = {row["name"]: row for row in found["tables"][table]["rows"]}
    for row in rows.values():
        assert not row.get("problem"), row
        assert row.get("identical") is not False, row
        assert row.get("equal") is not False, row
        if isinstance(row.get("seconds"), dict):
            assert 0 < row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]
    return rows


# All in one process: most of what a script takes here is the import of torch.
REFUSALS = """
import contextlib, io, json, runpy, sys
folder, *lines = sys.argv[1:]
sys.path.insert(0, folder)
ended = []
for line in lines:
    name, *words = json.loads(line)
    sys.argv = [name, *words]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            runpy.run_path(f"{folder}/{name}.py", run_name="__main__")
        except SystemExit as end:
            ended.append([end.code, out.getvalue()])
print(json.dumps(ended))
"""


def ends(folder: Path, *commands: list[str]) -> list[tuple[int, str]]:
    """Return status and output of scripts that measure nothing."""
    lines = [json.dumps(words) for words in commands]
    done = subprocess.run(
        [sys.executable, "-c", REFUSALS, str(SCRIPTS), *lines],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    ended: list[tuple[int, str]] = json.loads(done.stdout)
    assert len(ended) == len(commands)
    return ended


def test_help_says_how_long_it_takes(tmp_path: Path) -> None:
    names = {path.stem for path in SCRIPTS.glob("*.py")} - {"common", "peers", "ranks"}
    assert names == {
        "deepspeed_save_model", "dcp", "load", "onefile", "overlap", "phases", "scaling",
        "startup", "sweep", "threads", "torch_save_model", "torch_save_tensor",
    }  # fmt: skip
    for status, text in ends(tmp_path, *([name, "--help"] for name in sorted(names))):
        assert status == 0
        for words in ("--folder", "--short", "The full form takes about"):
            assert words in text


def test_what_cannot_be_measured(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    sweep = ["sweep", "--folder", str(disk), "--short"]
    refused = {
        "--op": [*sweep, "--op", "erase"],
        "transfer 'gpu'": [*sweep, "--transfer", "gpu"],
        "--queue-depth: expected a whole number": [*sweep, "--queue-depth", "four"],
        "multiple of 4096": [*sweep, "--block-size", "1000"],
        "no I/O engine 'warp'": [*sweep, "--engine", "warp"],
        "no combination is left": [*sweep, "--threads", "6", "--queue-depth", "2"],
        "expected a size": [*sweep, "--size", "much"],
        "create it first": [*sweep, "--json", "missing/out.json"],
        "smaller --size": ["dcp", "--folder", str(disk), "--size", "1000TB"],
        "no kind of save": ["overlap", "--folder", str(disk), "--short", "--only", "x"],
        "there is no model 'gpt9'": ["torch_save_model", "--folder", str(disk), "--model", "gpt9"],
    }
    if importlib.util.find_spec("transformers") is None:
        refused.popitem()
    for (status, text), message in zip(ends(tmp_path, *refused.values()), refused, strict=True):
        assert (status, message in text, "Traceback" in text) == (2, True, False), text
    assert list(disk.iterdir()) == []
    assert list(tmp_path.iterdir()) == [disk]


def test_a_csv_of_something_else_is_left_alone(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_text("name,value\na,1\n")
    words = ["sweep", "--folder", str(tmp_path), "--short", "--csv", str(table)]
    ((status, text),) = ends(tmp_path, words)
    assert status == 2
    assert "something else" in text
    assert table.read_text() == "name,value\na,1\n"


def test_torch_save_tensor(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    words = ["--mb_size", "1", "--no-fio", "--csv", str(tmp_path / "out.csv")]
    rows = rows_of(run("torch_save_tensor", tmp_path, *words, runs=2))
    durable = {name for name, row in rows.items() if row["group"] == "durable"}
    expected = {f"{who} {one}" for who in ("stock", "fastserial") for one in ("zip", "legacy")}
    assert durable >= expected | {"stock zip, CRC off", "safetensors", "DCP FileSystemWriter"}
    assert all(f"{name}, not durable" in rows for name in expected | {"safetensors"})
    for name in durable:
        assert rows[name]["to_stock"]["median"] > 0
        assert rows[name]["bytes"] >= 1 << 20
        assert len(rows[name]["runs"]) == 2
        assert rows[name]["identical"] or rows[name]["equal"] or name == "stock legacy"
    assert (tmp_path / "out.csv").read_text().count("\n") == 1 + len(rows)


def test_torch_save_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    words = ["--half", "--optimizer", "--legacy", "--no-loose", "--no-fio"]
    found = run("torch_save_model", tmp_path, *words)
    assert "gpt2-tiny, float16 weights, Adam's states in float32" in found["caption"]
    rows = rows_of(found)
    assert {"stock legacy", "fastserial legacy"} <= set(rows)
    assert not any("zip" in name for name in rows)
    assert rows["fastserial legacy"]["identical"]


def test_load(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    found = run("load", tmp_path, "--size", "9MiB", "--tensors", "5", "--temperature", "warm")
    rows = rows_of(found)
    assert {f"{OURS}, warm", f"{STOCK}, warm", "safetensors + clone, warm"} <= set(rows)
    assert "DCP FileSystemReader, warm" in rows
    assert not any("cold" in name for name in rows)
    assert all(row["equal"] for row in rows.values())


def test_scaling(tmp_path: Path) -> None:
    words = ["--max-size", "16KiB", "--max-tensors", "20", "--total", "8KiB"]
    found = run("scaling", tmp_path, *words)
    sizes, counts = (table["rows"] for table in found["tables"])
    assert {row["tensors"] for row in sizes} == {16}
    assert sorted({row["x"] for row in sizes}) == [1 << 10, 1 << 12, 1 << 14]
    assert sorted({row["x"] for row in counts}) == [1, 10, 20]
    for row in (*sizes, *counts):
        assert row["identical"] or row["equal"]
        assert row["bytes"] == row["data_bytes"]
        assert len(row["runs"]) == 4


def test_threads(tmp_path: Path) -> None:
    rows = rows_of(run("threads", tmp_path, "--size", "4MiB"))
    assert {"stock torch.save in a thread", "fastserial, in place"} <= set(rows)
    assert all(0 <= row["share"]["median"] <= 1 for row in rows.values())


def test_startup(tmp_path: Path) -> None:
    rows = rows_of(run("startup", tmp_path))
    assert 0 < rows["import fastserial, and install()"]["to_torch"]["median"] < 5


def test_overlap(tmp_path: Path) -> None:
    words = ["--only", "fastserial", "stock", "--threads", "1"]
    found = run("overlap", tmp_path, *OVERLAP, *words, runs=2)
    rows = {row["name"]: row for row in found["tables"][0]["rows"]}
    kinds = ["stock torch.save", *(f"fastserial, {n}" for n in ("blocking", "copy", "in place"))]
    assert list(rows) == ["no checkpoints", *kinds]
    for name in kinds:
        assert rows[name]["equal"] is True
        assert len(rows[name]["seconds"]) == len(rows[name]["without"]) == 2
        assert len(rows[name]["steps"]) == 2
        assert 0 < rows[name]["call_seconds"]["median"] <= max(rows[name]["seconds"])


def test_onefile(tmp_path: Path) -> None:
    words = ["--size", "12MiB", "--tensors", "20"]
    found = run("onefile", tmp_path, *words)
    rows = rows_of(found)
    ours = ["fastserial, 1 writer", "fastserial, 2 writers"]
    assert list(rows) == ["gather + torch.save", "DCP save + consolidation", *ours]
    assert all(row["bytes"] > 11 << 20 for row in rows.values())
    for count, name in enumerate(ours, 1):
        assert rows[name]["identical"] is True
        (ranks,) = rows[name]["ranks"]
        assert [part["rank"] for part in ranks] == [0, 1]
        assert [part["bytes"] > 0 for part in ranks] == [True, count > 1]
    assert set(rows_of(found, 1)) == {"rank 0", "rank 1"}


def test_dcp(tmp_path: Path) -> None:
    words = ["--size", "6MiB", "--tensors", "10", "--small", "20", "--planned", "20"]
    words += ["--case", "mixed", "small", "planning"]
    found = run("dcp", tmp_path, *words)
    mixed, small, planned = (rows_of(found, index) for index in range(3))
    ours = ["fastserial"]
    settings = ["2 threads", "CRC off", "2 threads, CRC off", "copies ahead"]
    assert list(mixed) == ["DCP", *(f"DCP, {text}" for text in settings), *ours]
    assert all(row["bytes"] > 5 << 20 for row in mixed.values())
    first = [f"{name}, first save" for name in ours]
    assert set(small) == {"DCP", *ours, *first}
    assert set(planned) - {"DCP, plan caching"} == {"DCP", ours[0], first[0]}
    for row in (*mixed.values(), *small.values(), *planned.values()):
        assert row["equal"] is True
        assert 0 < row["plan_seconds"]["median"] < row["seconds"]["median"]
    balance = rows_of(found, 3)
    assert all(row["ours_most"] <= 1.05 for row in balance.values())
    assert balance["one tensor of 1 GiB"]["stock_most"] == 4, "stock cuts a tensor"


@pytest.mark.skipif(not fio.installed(), reason="fio is not installed")
def test_fio_beside_the_ranks(tmp_path: Path) -> None:
    program = (
        "from ranks import best_fio, finish, start; from pathlib import Path\n"
        "found = best_fio(Path(start()['folder']), 8 << 20, 2, 0.0)\n"
        "finish([{'write': str(found[0]), 'read': str(found[1])}])\n"
    )
    script = tmp_path / "script.py"
    script.write_text(program)
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); from ranks import run_ranks\n"
        f"print(run_ranks({str(script)!r}, {{'folder': {str(tmp_path)!r}}}, 2))"
    )
    env = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert "fio " in done.stdout


def test_a_rank_that_fails_ends_the_run(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time\ntime.sleep(600) if os.environ['RANK'] == '0' else exit(3)")
    code = (
        f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); from ranks import run_ranks\n"
        f"run_ranks({str(script)!r}, {{}}, 2)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "rank 1 ended with 3" in done.stderr


def test_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    table = tmp_path / "sweep.csv"
    words = ["--size", "2MiB", "--block-size", "1MiB,2MiB", "--queue-depth", "6", "--threads", "6"]
    words += ["--csv", str(table)]
    found = run("sweep", tmp_path, *words, "--op", "write")
    rows = found["tables"][0]["rows"]
    assert [row["ratio_to_default"]["median"] > 0 for row in rows] == [True, True]
    assert "threads (default)" in {row["name"] for row in rows}
    assert found["notes"][0].startswith("# write, cpu: ")
    before = table.read_text()
    assert len(before.splitlines()) == 3
    table.write_text(before[:-20])  # the last line was cut
    run("sweep", tmp_path, *words, "--op", "write,read")
    lines = table.read_text().splitlines()
    assert lines[:2] == before.splitlines()[:2]
    assert len(lines) == 5
    run("sweep", tmp_path, *words, "--op", "write,read")
    assert table.read_text().splitlines() == lines


@pytest.mark.parametrize("legacy", [False, True])
def test_phases(tmp_path: Path, legacy: bool) -> None:
    trace = tmp_path / "trace.json"
    words = ["--size", "16MiB", "--tensors", "12", "--trace", str(trace)]
    found = run("phases", tmp_path, *words, *(["--legacy"] if legacy else []))
    caller = rows_of(found)
    assert sum(row["seconds"] for row in caller.values()) == pytest.approx(found["seconds"])
    assert sum(row["share"] for row in caller.values()) == pytest.approx(1)
    steps = {"open target", "pickle", "layout", "preallocate", "cut into blocks", "submit"}
    steps |= {"wait for blocks", "fsync", "rename", "directory sync"}
    assert steps <= set(caller)
    workers = rows_of(found, 1)
    assert sum(row["share"] for row in workers.values()) == pytest.approx(1)
    report = found["report"]
    blocks = -(-report["bytes"] // report["block_size"])
    assert workers["device write"]["times"] == pytest.approx(blocks, abs=1)
    copies = {name: row for name, row in {**caller, **workers}.items() if name == "CRC-32"}
    assert bool(copies) is not legacy
    assert rows_of(found, 2)["every file"]["identical"]
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
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
    levels = [event["args"] for event in events if event["ph"] == "C"]
    assert levels[-1] == {"blocks in flight": 0}
    assert max(level["blocks in flight"] for level in levels) <= 6


def test_plots(tmp_path: Path) -> None:
    target = tmp_path / "out.png"
    command = [sys.executable, str(SCRIPTS / "startup.py"), "--folder", str(tmp_path), "--short"]
    done = subprocess.run(
        [*command, "--plot", str(target)], capture_output=True, text=True, check=False
    )
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert done.returncode == 2
        assert "pip install matplotlib" in done.stderr
        assert list(tmp_path.iterdir()) == []
    else:
        assert done.returncode == 0, done.stderr
        assert target.read_bytes().startswith(b"\x89PNG")
