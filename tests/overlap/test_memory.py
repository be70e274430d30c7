"""What saves beside the program take: no more than the budget and the buffers, and no more of it
with each save."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "programs" / "many_saves.py"
MiB = 1024 * 1024
_MARGIN = 96 * MiB


@pytest.mark.trials(5, 500)
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "budget"),
    [("copy", 0), ("copy", 20 * MiB), ("copy", 200 * MiB), ("in_place", 20 * MiB)],
)
def test_memory(tmp_path: Path, trials: int, kind: str, budget: int) -> None:
    command = [sys.executable, PROGRAM, tmp_path, str(trials), kind, str(budget)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["state"] > 60 * MiB
    assert found["peak"] <= min(budget, found["state"]) + _MARGIN, found
    assert found["last"] - found["first"] <= 24 * MiB, found
    assert found["open"] <= 0, found
    assert found["threads"] <= 0, found
