"""A training run that is killed at any moment goes on as if nothing had been."""

from __future__ import annotations

import contextlib
import random
import time
from pathlib import Path

import pytest
from support import ranks
from support.forms import FULL

import fastserial

STEPS = 400 if FULL else 150


def losses(lines: list[str]) -> dict[int, str]:
    """Each step's loss and count; the last line may be cut off by the kill."""
    found = {}
    for line in lines:
        words = line.split()
        if line.endswith("\n") and len(words) == 3:
            found[int(words[0])] = " ".join(words[1:])
    return found


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The losses of a run that nobody kills."""
    (out,) = ranks.run("training", 1, tmp_path_factory.mktemp("unbroken"), STEPS)
    found = losses(out.splitlines(keepends=True))
    assert len(found) == STEPS
    return found


@pytest.mark.trials(2, 100)
@pytest.mark.timeout(3600)
def test_kill(tmp_path: Path, dice: random.Random, trials: int, unbroken: dict[int, str]) -> None:
    kills = hits = 0
    folder, told = tmp_path / "run", tmp_path / "told"
    while kills < trials:
        told.unlink(missing_ok=True)
        job = ranks.Job("training", 1, folder, STEPS, told)
        try:
            until = time.monotonic() + 60
            while "\n" not in job.out(0):
                assert time.monotonic() < until, "it does not start"
                time.sleep(0.002)
            time.sleep(dice.random() * 0.8)
            with contextlib.suppress(ProcessLookupError):  # it has come to its end
                job.kill(0)
        finally:
            (ended,) = job.wait(60)
        lines = ended.out.splitlines(keepends=True)
        first = lines[0]
        assert first.startswith("start"), ended
        kills += 1
        hits += ended.code == -9
        for step, loss in losses(lines).items():
            assert loss == unbroken[step], (step, first)
        reported = int(told.read_text() or 0) if told.exists() else 0
        names = sorted(path.name for path in folder.glob("step-*.pt"))
        newest = int(names[-1][5:-3]) if names else 0
        assert newest >= reported
        if newest:
            assert fastserial.verify(folder / names[-1]).ok
        assert len(names) <= 3  # one may be in place before the oldest is gone
        if newest == STEPS:
            folder = tmp_path / f"run{kills}"
    assert hits
    (out,) = ranks.run("training", 1, folder, STEPS)
    rest = losses(out.splitlines(keepends=True))
    assert all(unbroken[step] == loss for step, loss in rest.items())
    print(f"{kills} kills, {hits} before the end")
