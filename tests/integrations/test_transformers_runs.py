"""Hugging Face's Trainer and accelerate train, are killed (-9) in the middle of a checkpoint, and
go on: with the same losses. Stock beside ours, and what stock does with a torn checkpoint."""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path

import pytest

if importlib.util.find_spec("transformers") is None or not importlib.util.find_spec("accelerate"):
    pytest.skip(
        "transformers and accelerate are not installed: nox -s integrations",
        allow_module_level=True,
    )

from support.runs import Run, Unbroken

TRAINER = "trainer_run"
ACCELERATE = "accelerate_run"
STEPS = 8
FAST = {"fast": True, "safetensors": True, "callback": True}


def checkpoints(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_trainer(run: Run, unbroken: Unbroken, tmp_path: Path) -> None:
    """Killed in `checkpoint-6`: its weights are there, its schedule is not."""
    folder = tmp_path / "out"
    killed = run(TRAINER, folder=str(folder), **FAST, kill_in=3)
    assert killed.code == -signal.SIGKILL, killed.output
    assert checkpoints(folder) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    losses, last = unbroken(run, TRAINER, STEPS)
    resumed = run(TRAINER, folder=str(folder), **FAST, resume=True)
    assert resumed.code == 0, resumed.output
    assert f"{folder}/checkpoint-4" in resumed.output
    assert resumed.losses == losses[4:]
    assert killed.losses == losses[: len(killed.losses)]
    assert checkpoints(folder) == ["checkpoint-6", "checkpoint-8"]
    # the weights, byte for byte
    ours = (folder / "checkpoint-8" / "model.safetensors").read_bytes()
    assert ours == (last / "checkpoint-8" / "model.safetensors").read_bytes()


def test_two_ranks(run: Run, tmp_path: Path) -> None:
    """The mark names the files of both; it comes when both are on the disk."""
    from fastserial.integrations.transformers import is_complete

    ran = run(TRAINER, ranks=2, folder=str(tmp_path / "out"), **FAST)
    assert ran.code == 0, ran.output
    last = tmp_path / "out" / "checkpoint-8"
    assert is_complete(last)
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= set(os.listdir(last))


@pytest.mark.parametrize(("ours", "safe"), [(True, True), (True, False), (False, True)])
def test_accelerate(run: Run, unbroken: Unbroken, ours: bool, safe: bool, tmp_path: Path) -> None:
    """Switched on from outside; what was saved with fastserial is loaded without, and back."""
    folder = tmp_path / "out"
    killed = run(ACCELERATE, fastserial=ours, folder=str(folder), safe=safe, kill_in=3)
    assert killed.code == -signal.SIGKILL, killed.output
    assert not (folder / "state-6" / "optimizer.bin").exists()
    losses, last = unbroken(run, ACCELERATE, STEPS)
    resume = str(folder / "state-4")
    for fast in (True, False):
        resumed = run(ACCELERATE, fastserial=fast, folder=str(folder), safe=safe, resume=resume)
        assert resumed.code == 0, resumed.output
        assert resumed.losses == losses[4:]
    for name in ("optimizer.bin", "scheduler.bin"):
        saved = (folder / "state-8" / name).read_bytes()
        assert saved == (last / "state-8" / name).read_bytes()
