"""Lightning trains, is killed (-9) in the middle of a save, and goes on: with the same losses.

Stock beside ours, and what stock loses.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("lightning") is None:
    pytest.skip("Lightning is not installed: nox -s integrations", allow_module_level=True)

from support import ranks
from support.runs import Run, Unbroken

PROGRAM = "lightning_run"
STEPS = 12


DDP = {"devices": 2, "strategy": "ddp"}
FSDP2 = {"devices": 2, "strategy": "fsdp2"}


def steps(lines: list[str], first: int) -> list[str]:
    return [line for line in lines if int(line.split()[0]) >= first]


def files(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


RUNS = [
    *(pytest.param(io, {}, id=io) for io in ("stock", "fast", "async")),
    *(pytest.param(io, DDP, id=f"{io}-ddp") for io in ("fast", "async")),
]


@pytest.mark.parametrize(("io", "parallel"), RUNS)
def test_killed_in_a_save_and_resumed(
    run: Run, unbroken: Unbroken, io: str, parallel: dict[str, Any], tmp_path: Path
) -> None:
    """The third save (of step 6) of `step=6.ckpt`; step 4 is the last whole one.

    Of two gloo processes the one that saves is killed, and takes the other with it.
    """
    folder = tmp_path / "ckpt"
    killed = run(PROGRAM, folder=str(folder), io=io, kill_in=3, **parallel)
    assert killed.code == -signal.SIGKILL, killed.output
    assert files(folder) == ["step=2.ckpt", "step=4.ckpt"]
    resume = str(folder / "step=4.ckpt")
    resumed = run(PROGRAM, folder=str(folder), io=io, resume=resume, **parallel)
    assert resumed.code == 0, resumed.output
    losses, _ = unbroken(run, PROGRAM, STEPS * parallel.get("devices", 1), **parallel)
    assert killed.losses
    assert set(killed.losses) <= set(losses)
    assert resumed.losses == steps(losses, 4)
    assert files(folder) == ["step=10.ckpt", "step=12.ckpt", "step=4.ckpt"]  # as stock: not its own


def test_fsdp2_and_one_file(run: Run, unbroken: Unbroken, tmp_path: Path) -> None:
    """Lightning gathers and rank 0 writes, or all ranks write: either resumes from both."""
    held = {}
    for io, other in (("stock", "fast"), ("fast", "stock")):
        folder = tmp_path / io
        killed = run(PROGRAM, folder=str(folder), io=io, kill_in=3, **FSDP2)
        assert killed.code != 0
        assert files(folder) == ["step=2.ckpt", "step=4.ckpt"], killed.output
        resume = str(folder / "step=4.ckpt")
        held[io] = torch.load(resume, weights_only=False)
        resumed = run(PROGRAM, folder=str(folder), io=other, resume=resume, **FSDP2)
        assert resumed.code == 0, resumed.output
        assert resumed.losses == steps(unbroken(run, PROGRAM, 2 * STEPS, **FSDP2)[0], 4)
    assert list(held["fast"]) == list(held["stock"])
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        torch.testing.assert_close(held["fast"][part], held["stock"][part], rtol=0, atol=0)


def test_a_folder_that_rank_0_cannot_make(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert ranks.run("lightning_refused", 2, tmp_path, timeout=100) == ["done\n"] * 2
