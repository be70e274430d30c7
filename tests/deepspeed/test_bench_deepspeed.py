"""`benchmarks/deepspeed_save_model.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"
TINY = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 512,
    "n_positions": 64,
}  # fmt: skip


def run(name: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), "--folder", str(folder), "--short"]
    command += ["--json", str(folder / "out.json"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)


@pytest.mark.parametrize(("stage", "world", "legacy"), [(1, 2, False), (3, 1, True)])
def test_all_rows(op: Any, tmp_path: Path, stage: int, world: int, legacy: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    words = ["--model", str(tmp_path), "--zero_stage", str(stage), "--world_size", str(world)]
    words += ["--pause", "0", *(["--legacy"] if legacy else [])]
    done = run("deepspeed_save_model", tmp_path, *words)
    assert done.returncode == 0, done.stderr
    (table,) = json.loads((tmp_path / "out.json").read_text())["tables"]
    rows = {row["name"]: row for row in table["rows"]}
    names = {"stock DeepSpeed", "fastserial", "DeepSpeed's fast writer"}
    assert set(rows) == names | {"fastserial, engine deepspeed"}
    for name, row in rows.items():
        assert row["problem"] is None, name
        assert len(row["runs"]) == 1
        assert row["files"] == (1 + world if stage == 1 else 2 * world)
        assert row["bytes"] > 500_000
        compared = not legacy and "writer" not in name
        assert row["identical"] is (True if compared else None)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "out.json"}
