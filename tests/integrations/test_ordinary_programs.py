"""Ordinary programs on libraries that know nothing of us, killed and resumed beside stock.

Each is `tests/programs/ordinary/NAME.py`; what is done with it, `killed_and_resumed.py`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[1] / "programs"
# Each program, and what it needs beside torch.
NAMES = {
    "compiled": [],
    "ema": ["torch_ema"],
    "gan": [],
    "lora": ["peft", "transformers"],
    "milestones": [],
    "momentum_encoder": [],
    "own_optimizer": [],
    "sac": [],
    "sam": ["pytorch_optimizer"],
    "stateful_loader": ["torchdata"],
}
# Where a step changes parameters while the checkpoint before is written.
CONTROLS = ["ema", "momentum_encoder"]


def run(name: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    for package in NAMES[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if name == "compiled" and shutil.which("g++") is None:
        pytest.skip("g++ is not there, which torch.compile calls")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(PROGRAMS.parent), *filter(None, sys.path)]),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [sys.executable, str(PROGRAMS / "killed_and_resumed.py"), name, str(folder), *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )


@pytest.mark.parametrize("name", NAMES)
def test_killed_and_resumed_it_ends_as_stock(tmp_path: Path, name: str) -> None:
    done = run(name, tmp_path, "1")
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("the same\n")


@pytest.mark.parametrize("name", NAMES)
def test_on_two_ranks(tmp_path: Path, name: str) -> None:
    done = run(name, tmp_path, "2")
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("the same\n")


@pytest.mark.parametrize("name", CONTROLS)
def test_control(tmp_path: Path, name: str) -> None:
    """A checkpoint that is of a later moment than its call is noticed."""
    done = run(name, tmp_path, "1", "control")
    assert done.returncode == 1
    assert "not the same" in done.stdout
