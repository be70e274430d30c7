"""Data loaders of several ranks: after a kill each goes on with the batches of an unbroken run."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

import pytest
from support import ranks
from support.forms import FULL

pytest.importorskip("torchdata", reason="torchdata is not installed")

STEPS = 60


def batches(out: str) -> dict[str, str]:
    """The batch of each step; the last line may be cut off."""
    lines = [line for line in out.splitlines(keepends=True) if line.endswith("\n")]
    return dict(line.split(" ", 1) for line in lines if not line.startswith("start"))


def start(out: str) -> int:
    return int(out.split()[1])


@pytest.mark.trials(2, 30)
@pytest.mark.timeout(3600)
def test_the_same_batches(tmp_path: Path, dice: random.Random, trials: int) -> None:
    unbroken = [batches(out) for out in ranks.run("ranks_loader", 2, tmp_path / "unbroken", STEPS)]
    assert unbroken[0] != unbroken[1]
    kills = 0
    for trial in range(trials):
        folder = tmp_path / str(trial)
        job = ranks.Job("ranks_loader", 2, folder, STEPS)
        try:
            until = time.monotonic() + 60
            wanted = dice.randrange(8, STEPS)  # by then the save of step 3 was waited for
            while len(batches(job.out(1))) < wanted and job.out(1).count("\n") <= STEPS:
                assert time.monotonic() < until, "it does not train"
                time.sleep(0.002)
            with contextlib.suppress(ProcessLookupError):  # it has come to its end
                job.kill(dice.randrange(2))
        finally:
            ended = job.wait(60)
        kills += any(end.code == -9 for end in ended)
        outs = ranks.run("ranks_loader", 2, folder, STEPS)
        for out, end, expected in zip(outs, ended, unbroken, strict=True):
            assert batches(end.out).items() <= expected.items()
            assert batches(out) == {
                step: batch for step, batch in expected.items() if int(step) > start(out)
            }
        assert start(outs[0]) == start(outs[1]) > 0
        if not FULL:
            break
    assert kills


def test_control_without_the_loaders_state_the_batches_differ(tmp_path: Path) -> None:
    found = {}
    for words in ((), ("control",)):
        folder = tmp_path / str(len(words))
        unbroken = batches(ranks.run("ranks_loader", 1, folder / "unbroken", 8)[0])
        ranks.run("ranks_loader", 1, folder, 4, *words)
        again = batches(ranks.run("ranks_loader", 1, folder, 8, *words)[0])
        assert list(again) == ["4", "5", "6", "7", "8"]
        found[words] = again.items() <= unbroken.items()
    assert found == {(): True, ("control",): False}
