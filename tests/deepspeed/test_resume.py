"""Train, save through fastserial, kill -9, resume: the losses are those of a run without a break.

On CPU with gloo, in bf16 with fp32 optimizer states, under ZeRO 0 to 3 on one and two processes.
"""

from __future__ import annotations

import signal
from functools import cache
from pathlib import Path

import pytest
from said import Launch, having, losses

STEPS, SAVED, KILLED = 20, 10, 13


@cache
def unbroken_losses(launch: Launch, world: int, words: str) -> dict[tuple[int, int], str]:
    """The losses of a run that saves nothing."""
    return losses(launch(world, *words.split(), "--steps", STEPS))


@pytest.mark.parametrize(
    ("world", "words", "resume_via"),
    [
        *[(world, f"--bf16 --stage {n}", "enable") for world in (1, 2) for n in range(4)],
        *[(1, f"--stage {stage}", "enable") for stage in (0, 2)],
        *[(2, f"--bf16 --overlap --stage {stage}", "enable") for stage in (0, 2, 3)],
        (1, "--bf16 --stage 1 --legacy", "enable"),
        *[(2, f"--bf16 --stage {stage}", "stock") for stage in (1, 3)],
    ],
)
def test_it_goes_on_bit_for_bit(
    launch: Launch, tmp_path: Path, world: int, words: str, resume_via: str
) -> None:
    """Also where a program without fastserial goes on from our files."""
    options = words.split()
    training = " ".join(word for word in options if word not in ("--overlap", "--legacy"))
    unbroken = unbroken_losses(launch, world, training)
    assert len(unbroken) == STEPS * world

    at = ["--folder", tmp_path, "--steps", STEPS]
    kill = ["--via", "enable", "--save-at", SAVED, "--kill-at", KILLED]
    killed = launch(world, *options, *at, *kill, code=-signal.SIGKILL)
    assert {line["by"] for line in having(killed, "saved")} == {"FastserialCheckpointEngine"}
    assert len(losses(killed)) == KILLED * world
    assert losses(killed).items() <= unbroken.items()

    resumed = launch(world, *options, *at, "--via", resume_via, "--resume")
    loaders = {line["loader"] for line in having(resumed, "loaded")}
    assert (None in loaders) == (resume_via == "stock")
    assert len(losses(resumed)) == (STEPS - SAVED) * world
    assert losses(resumed).items() <= unbroken.items()
