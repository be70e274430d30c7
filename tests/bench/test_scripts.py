"""Each script of benchmarks/ runs once, with little data, and what it writes makes sense."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import processes

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"
NOT_SCRIPTS = {"all", "common", "models", "peers", "ranks", "scaling"}
MATRIX = "--size 2MiB --block-size 1MiB,2MiB --queue-depth 6 --threads 6"
# What makes it shorter than --short, what it needs beside torch, and some of the rows it must have.
RUNS: dict[str, tuple[str, tuple[str, ...], set[str]]] = {
    "torch_save_tensor": (
        "--mb_size 1 --no-fio",
        ("safetensors",),
        {"stock zip", "fastserial legacy", "safetensors, not durable", "DCP FileSystemWriter"},
    ),
    "torch_save_model": (
        "--half --optimizer --legacy --no-loose --no-fio",
        ("transformers",),
        {"stock legacy", "fastserial legacy"},
    ),
    "deepspeed_save_model": (
        f"--model {Path(__file__).with_name('tiny')} --world_size 2",
        ("deepspeed", "transformers"),
        {"stock DeepSpeed", "fastserial"},
    ),
    "load": (
        "--size 9MiB --tensors 5 --temperature warm",
        ("safetensors",),
        {"fastserial zip, warm", "safetensors + clone, warm", "DCP FileSystemReader, warm"},
    ),
    "sizes": ("--max-size 2KiB --max-tensors 2 --total 8KiB", (), {"stock zip"}),
    "threads": ("--size 4MiB", (), {"stock torch.save in a thread", "fastserial, save_async"}),
    "overlap": (
        "--model tiny --tokens 16 --batch 1 --every 1 --saves 1 --only fastserial stock",
        (),
        {"no checkpoints", "stock torch.save", "fastserial, save_async"},
    ),
    "onefile": (
        "--size 12MiB --tensors 20",
        (),
        {"gather + torch.save", "fastserial, 1 writer", "fastserial, 2 writers"},
    ),
    "dcp": (
        "--size 6MiB --tensors 10 --small 20 --planned 20 --case mixed planning",
        (),
        {"DCP", "fastserial"},
    ),
    "sweep": (f"{MATRIX} --op write", (), {"write, cpu: threads, 6 × 2MiB, 6 threads (default)"}),
    "resume": ("--only mirror --every 1", ("fsspec",), {"Checkpointer, mirror"}),
}


def run(name: str, folder: Path, *words: object) -> dict[str, Any]:
    """Run a script in its short form, with other sizes; return what it wrote as JSON."""
    disk, target = folder / "disk", folder / "out.json"
    disk.mkdir(exist_ok=True)
    table = folder / "out.csv"
    common = (
        "--folder",
        disk,
        "--short",
        "--pause",
        0,
        "--runs",
        1,
        "--json",
        target,
        "--csv",
        table,
    )
    where: dict[str, Any] = {"cwd": folder, "variables": {"OMP_NUM_THREADS": "1"}}
    processes.python(SCRIPTS / f"{name}.py", *common, *words, timeout=280, **where)
    assert list(disk.iterdir()) == []
    found: dict[str, Any] = json.loads(target.read_text())
    assert found["command"].startswith(f"{name}.py")
    with table.open(encoding="utf-8") as file:
        names = [line["name"] for line in csv.DictReader(file)]
    assert names == [row["name"] for table in found["tables"] for row in table["rows"]]
    assert found["machine"]["torch"] == torch.__version__
    return found


def test_every_script_is_run_here() -> None:
    names = {path.stem for path in SCRIPTS.glob("*.py")} - NOT_SCRIPTS
    assert names == set(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_scripts(name: str, tmp_path: Path) -> None:
    words, packages, expected = RUNS[name]
    for package in packages:
        pytest.importorskip(package)
    found = run(name, tmp_path, *words.split())
    rows = [row for table in found["tables"] for row in table["rows"]]
    assert expected <= {row["name"] for row in rows}
    for row in rows:
        assert not row.get("problem"), row
        assert row.get("identical") is not False, row
        assert row.get("equal") is not False, row
        if isinstance(row.get("seconds"), dict):
            assert 0 < row["seconds"]["low"] <= row["seconds"]["median"] <= row["seconds"]["high"]
        if row["name"] in ("fastserial zip", "fastserial legacy"):
            assert row["identical"] is True


def test_what_many_ranks_cost_a_single_one(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    processes.python(SCRIPTS / "scaling.py", "--ranks", 8, "--tensors", 20, "--json", target)
    rows = json.loads(target.read_text())["rows"]
    assert {row["rank"] for row in rows} == {0, 4, 7}
    assert {row["placement"] for row in rows} == {"FSDP2", "HSDP", "FSDP x TP x PP"}
    for row in rows:
        assert row["ranks"] == 8
        assert row["tensors"] == 20
        assert row["cpu_seconds"] > 0
        assert row["peak_bytes"] > 0
        assert min(row["sent_bytes"], row["messages"]) >= 0


def test_a_size_is_positive(tmp_path: Path) -> None:
    words = ("--folder", tmp_path, "--size=-5MB")
    done = processes.python(SCRIPTS / "threads.py", *words, code=2)
    assert "expected a size above 0, not '-5MB'" in done.err


def test_all_of_them_go_into_one_file(tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    words = ("--folder", tmp_path, "--short", "--results", target, "--only", "threads")
    processes.python(SCRIPTS / "all.py", *words)
    assert json.loads(target.read_text())["threads"]["command"].startswith("threads.py --folder")
    again = processes.python(SCRIPTS / "all.py", *words)  # it goes on where it was
    assert again.out.split() == [str(target)]
