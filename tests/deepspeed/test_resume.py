"""Train, save through fastserial, kill -9, resume: the losses are those of a run without a break.

On CPU with gloo, in bf16 with fp32 optimizer states, under ZeRO 0 to 3 on one and two processes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from said import Said, check_exit, having, losses

STEPS, SAVED, KILLED = 20, 10, 13
Launch = Callable[..., Said]


def resumed_equals_unbroken(
    launch: Launch, folder: Path, world: int, *options: object, resume_via: str = "enable"
) -> None:
    unbroken = launch(world, *options, "--steps", STEPS)
    check_exit(unbroken)
    assert len(losses(unbroken)) == STEPS * world

    at = ["--folder", folder, "--steps", STEPS]
    killed = launch(
        world, *options, *at, "--via", "enable", "--save-at", SAVED, "--kill-at", KILLED
    )
    check_exit(killed, -signal.SIGKILL)
    assert [line["by"] for line in having(killed, "saved")] == [
        "FastserialCheckpointEngine"
    ] * world
    assert len(losses(killed)) == KILLED * world
    assert losses(killed).items() <= losses(unbroken).items()

    resumed = launch(world, *options, *at, "--via", resume_via, "--resume")
    check_exit(resumed)
    loaders = {line["loader"] for line in having(resumed, "loaded")}
    assert (None in loaders) == (resume_via == "stock")
    assert len(losses(resumed)) == (STEPS - SAVED) * world
    assert losses(resumed).items() <= losses(unbroken).items()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero(launch: Launch, tmp_path: Path, stage: int, world: int) -> None:
    resumed_equals_unbroken(launch, tmp_path, world, "--bf16", "--stage", stage)


@pytest.mark.parametrize("stage", [0, 2])
def test_fp32(launch: Launch, tmp_path: Path, stage: int) -> None:
    resumed_equals_unbroken(launch, tmp_path, 1, "--stage", stage)


def test_legacy_format(launch: Launch, tmp_path: Path) -> None:
    resumed_equals_unbroken(launch, tmp_path, 1, "--bf16", "--stage", 1, "--legacy")


@pytest.mark.parametrize("stage", [0, 2])
def test_mixture_of_experts(launch: Launch, tmp_path: Path, stage: int) -> None:
    resumed_equals_unbroken(launch, tmp_path, 2, "--bf16", "--stage", stage, "--experts", 2)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_overlapped(launch: Launch, tmp_path: Path, stage: int) -> None:
    """A checkpoint that was written while training went on."""
    resumed_equals_unbroken(launch, tmp_path, 2, "--bf16", "--stage", stage, "--overlap")


@pytest.mark.parametrize("stage", [1, 3])
def test_stock_deepspeed_resumes(launch: Launch, tmp_path: Path, stage: int) -> None:
    """A program without fastserial goes on from our files."""
    options: list[Any] = ["--bf16", "--stage", stage]
    resumed_equals_unbroken(launch, tmp_path, 2, *options, resume_via="stock")
