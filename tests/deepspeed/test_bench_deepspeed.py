"""`fastserial bench deepspeed` and the rows for `bench save`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fastserial.bench.measuring.errors import BenchError
from fastserial.bench.measuring.rotation import Plan, rotate
from fastserial.bench.studies.deepspeed import run_deepspeed
from fastserial.bench.studies.deepspeed_plan import DeepSpeedBench
from fastserial.bench.subjects.peers import engine_rows, their_rows
from fastserial.bench.subjects.torch_rows import stock_row

pytest.importorskip("transformers")
TINY = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 512,
    "n_positions": 64,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with a transformers config."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return str(folder)


@pytest.mark.parametrize(("stage", "world", "legacy"), [(1, 2, False), (3, 1, True)])
def test_all_rows(
    op: Any, model: str, tmp_path: Path, stage: int, world: int, legacy: bool
) -> None:
    bench = DeepSpeedBench(model, str(tmp_path), stage, world, runs=1, legacy=legacy, pause=0)
    results = {result.name: result for result in run_deepspeed(bench)}
    assert list(results) == [
        "stock DeepSpeed", "DeepSpeed's fast writer", "fastserial", "fastserial, engine deepspeed",
    ]  # fmt: skip
    for name, result in results.items():
        assert result.problem is None, name
        assert len(result.seconds) == 1
        assert result.files == (1 + world if stage == 1 else 2 * world)
        assert result.nbytes > 500_000
        compared = not legacy and "writer" not in name
        assert result.identical is (True if compared else None)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_command(model: str, tmp_path: Path) -> None:
    """A table for people, and JSON."""
    code = (
        "import typer; import fastserial.bench.cli.deepspeed as b; typer.run(b.deepspeed_command)"
    )
    command = [sys.executable, "-c", code, "--model", model, "--folder", str(tmp_path)]
    command += ["--runs", "1", "--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "DeepSpeed's fast writer" in done.stdout
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [row["name"] for row in rows][2] == "fastserial"


def test_unknown_model(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="there is no model 'gpt9'"):
        run_deepspeed(DeepSpeedBench("gpt9", str(tmp_path), runs=1))


def test_rows_of_bench_save(op: Any, tmp_path: Path) -> None:
    state = {"a": torch.rand(800_000), "b": torch.ones(7)}
    ours, missing_engines = engine_rows(state, ("zip", "legacy"))
    theirs, missing = their_rows(state, ("zip", "legacy"))
    assert (missing_engines, missing) == ({}, None)
    first = [stock_row(state, "zip"), stock_row(state, "legacy")]
    measured = rotate([*first, *ours, *theirs], tmp_path, Plan(runs=1, warmups=0, pause=0))
    identical = {one.row.name: one.identical for one in measured[2:]}
    assert identical == {
        "fastserial zip, engine deepspeed": True,
        "fastserial legacy, engine deepspeed": True,
        "DeepSpeed's writer, zip": None,
        "DeepSpeed's writer, legacy": True,
    }
    assert {one.row.name: one.equal for one in measured}["DeepSpeed's writer, zip"]
