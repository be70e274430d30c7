"""Ordinary programs on libraries that know nothing of us, killed and resumed beside stock.

Each is `tests/programs/integrations/ordinary/NAME.py`; `killed_and_resumed.py` runs it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from support import processes

# Each program, and what it needs beside torch.
NAMES = {
    "ema": ["torch_ema"],
    "lora": ["peft", "transformers"],
    "stateful_loader": ["torchdata"],
}
# Where a step changes parameters while the checkpoint before is written.
CONTROLS = ["ema"]


def run(name: str, folder: Path, *words: object, code: int = 0) -> processes.Ended:
    for package in NAMES[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    variables = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return processes.run("killed_and_resumed", name, folder, *words, code=code, variables=variables)


@pytest.mark.parametrize("name", NAMES)
def test_killed_and_resumed_it_ends_as_stock(tmp_path: Path, name: str) -> None:
    assert run(name, tmp_path, 1).out.endswith("the same\n")


@pytest.mark.parametrize("name", NAMES)
def test_on_two_ranks(tmp_path: Path, name: str) -> None:
    assert run(name, tmp_path, 2).out.endswith("the same\n")


@pytest.mark.parametrize("name", CONTROLS)
def test_control(tmp_path: Path, name: str) -> None:
    """A checkpoint that is of a later moment than its call is noticed."""
    assert "not the same" in run(name, tmp_path, 1, "control", code=1).err
