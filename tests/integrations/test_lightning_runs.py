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
from support.runs import Ran, Run

PROGRAM = "lightning_run"
STEPS = 12
ALL = ["stock", "fast", "async"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """The losses of stock Lightning, without a break, for a number of ranks."""
    known: dict[tuple[int, str], list[str]] = {}

    def losses(run: Run, ranks: int = 1, strategy: str = "ddp") -> list[str]:
        if (ranks, strategy) not in known:
            folder = tmp_path_factory.mktemp("unbroken")
            ran = run(PROGRAM, folder=str(folder), io="stock", last=None, **_of(ranks, strategy))
            assert ran.code == 0, ran.output
            assert len(ran.losses) == STEPS * ranks
            known[ranks, strategy] = ran.losses
        return known[ranks, strategy]

    return losses


def _of(ranks: int, strategy: str = "ddp") -> dict[str, Any]:
    return {"devices": ranks, "strategy": strategy} if ranks > 1 else {}


def steps(lines: list[str], first: int) -> list[str]:
    return [line for line in lines if int(line.split()[0]) >= first]


def files(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if not name.startswith("."))


@pytest.mark.parametrize("io", ALL)
def test_killed_in_a_save_and_resumed(run: Run, unbroken: Any, io: str, tmp_path: Path) -> None:
    """The third save (of step 6) of `step=6.ckpt`; step 4 is the last whole one."""
    folder = tmp_path / "ckpt"
    killed = run(PROGRAM, folder=str(folder), io=io, last=None, kill_in=3)
    assert killed.code == -signal.SIGKILL, killed.output
    assert files(folder) == ["step=2.ckpt", "step=4.ckpt"]
    resume = str(folder / "step=4.ckpt")
    resumed = run(PROGRAM, folder=str(folder), io=io, last=None, resume=resume)
    assert resumed.code == 0, resumed.output
    assert killed.losses == unbroken(run)[: len(killed.losses)]
    assert resumed.losses == steps(unbroken(run), 4)
    assert files(folder) == ["step=10.ckpt", "step=12.ckpt", "step=4.ckpt"]  # as stock: not its own


@pytest.mark.parametrize("io", ["fast", "async"])
def test_ddp(run: Run, unbroken: Any, io: str, tmp_path: Path) -> None:
    """Two gloo processes; the rank that saves is killed, and takes the other with it."""
    folder = tmp_path / "ckpt"
    killed: Ran = run(PROGRAM, folder=str(folder), io=io, last=None, kill_in=3, **_of(2))
    assert killed.code != 0
    assert files(folder) == ["step=2.ckpt", "step=4.ckpt"], killed.output
    resume = str(folder / "step=4.ckpt")
    resumed = run(PROGRAM, folder=str(folder), io=io, last=None, resume=resume, **_of(2))
    assert resumed.code == 0, resumed.output
    assert resumed.losses == steps(unbroken(run, 2), 4)


def test_fsdp2_and_one_file(run: Run, unbroken: Any, tmp_path: Path) -> None:
    """Lightning gathers and rank 0 writes, or all ranks write: either resumes from both."""
    two = _of(2, "fsdp2")
    held = {}
    for io, other in (("stock", "fast"), ("fast", "stock")):
        folder = tmp_path / io
        killed = run(PROGRAM, folder=str(folder), io=io, last=None, kill_in=3, **two)
        assert killed.code != 0
        assert files(folder) == ["step=2.ckpt", "step=4.ckpt"], killed.output
        resume = str(folder / "step=4.ckpt")
        held[io] = torch.load(resume, weights_only=False)
        resumed = run(PROGRAM, folder=str(folder), io=other, last=None, resume=resume, **two)
        assert resumed.code == 0, resumed.output
        assert resumed.losses == steps(unbroken(run, 2, "fsdp2"), 4)
    assert list(held["fast"]) == list(held["stock"])
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        torch.testing.assert_close(held["fast"][part], held["stock"][part], rtol=0, atol=0)


def test_a_folder_that_rank_0_cannot_make(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert ranks.run("lightning_refused", 2, tmp_path, timeout=100) == ["done\n"] * 2
