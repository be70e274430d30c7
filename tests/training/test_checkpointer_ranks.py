"""Checkpointer in a job of several ranks: one file a step, and the same decisions on all.

`FASTSERIAL_DISTRIBUTED=full` kills a hundred times.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from support import ranks

import fastserial

FULL = os.environ.get("FASTSERIAL_DISTRIBUTED") == "full"
KINDS = ("ddp",) if torch.__version__.startswith("2.6.") else ("ddp", "fsdp")  # no FSDP2 on CPUs
PAIRS = list(product(KINDS, (2, 4))) if FULL else [(KINDS[0], 2), (KINDS[-1], 4)]
STEPS = 60


def losses(out: str) -> dict[int, str]:
    """Each step's loss and count; the last line may be cut off."""
    lines = out.splitlines(keepends=True)
    found = [line.split() for line in lines if re.fullmatch(r"\d+ \S+ \d+\n", line)]
    return {int(step): f"{loss} {draws}" for step, loss, draws in found}


@cache
def unbroken(kind: str, count: int, folder: Path) -> list[dict[int, str]]:
    """The losses of a run that nobody disturbs, by rank."""
    folder = folder / f"unbroken-{kind}-{count}"
    return [losses(out) for out in ranks.run("ranks_training", count, folder, kind, STEPS, 10)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_goes_on(
    folder: Path, kind: str, count: int, shared: Path, start: int, *words: str
) -> None:
    """Run to the end, and compare each rank's losses."""
    outs = ranks.run("ranks_training", count, folder, kind, STEPS, 10)
    for out, expected in zip(outs, unbroken(kind, count, shared), strict=True):
        first = out.splitlines()[0]
        assert first.split()[:2] == ["start", str(start)], first
        assert all(word in first for word in words), first
        assert losses(out) == {step: loss for step, loss in expected.items() if step > start}


@pytest.mark.parametrize(("kind", "count"), PAIRS)
def test_it_goes_on_bit_for_bit(tmp_path: Path, shared: Path, kind: str, count: int) -> None:
    folder = tmp_path / "run"
    ranks.run("ranks_training", count, folder, kind, 30, 10)
    assert names(folder) == ["step-00000020.pt", "step-00000030.pt"]
    found = torch.load(folder / "step-00000030.pt")
    assert found["checkpointer"]["step"] == 30
    assert len(found["checkpointer"]["rng"]) == count
    assert found["model"]["0.weight"].shape == (520, 520)
    assert_goes_on(folder, kind, count, shared, 30)
    assert names(folder) == ["step-00000050.pt", "step-00000060.pt"]


DAMAGES = {
    "a bit of a tensor": lambda size: size // 2,
    "a bit of the pickle": lambda size: 300,
    "the end": lambda size: None,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_all_fall_back_from_a_damaged_file(tmp_path: Path, shared: Path, name: str) -> None:
    folder = tmp_path / "run"
    ranks.run("ranks_training", 2, folder, "ddp", 20, 10)
    newest = folder / "step-00000020.pt"
    text = bytearray(newest.read_bytes())
    at = DAMAGES[name](len(text))
    if at is None:
        del text[-1000:]
    else:
        text[at] ^= 1
    newest.write_bytes(text)
    assert_goes_on(folder, "ddp", 2, shared, 10, "step-00000020.pt is damaged")


def test_a_signal_on_one_rank_is_one_on_all(tmp_path: Path, shared: Path) -> None:
    folder = tmp_path / "run"
    job = ranks.Job("ranks_training", 2, folder, "ddp", 10**6, 10**6)
    try:
        until = time.monotonic() + 60
        while len(losses(job.out(1))) < 5:
            assert time.monotonic() < until, "it does not train"
            time.sleep(0.01)
        os.kill(job.pid(1), signal.SIGUSR1)
    finally:
        ended = job.wait(60)
    assert [end.code for end in ended] == [0, 0], ended
    stops = {end.out.splitlines()[-1] for end in ended}
    assert len(stops) == 1
    step = int(stops.pop().removeprefix("stopped "))
    assert names(folder) == [f"step-{step:08d}.pt"]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_kill(tmp_path: Path, shared: Path, kind: str) -> None:
    dice = random.Random(kind)
    trials, hits = 50 if FULL else 3, 0
    count, run = 2, 0
    folder, flags, told = tmp_path / "run0", tmp_path / "flags", tmp_path / "told"
    for _ in range(trials):
        told.unlink(missing_ok=True)
        flags.write_bytes(bytes(count))
        job = ranks.Job("ranks_training", count, folder, kind, STEPS, 1, flags, told)
        victim = dice.randrange(count)
        try:
            until = time.monotonic() + 60
            while "start" not in job.out(victim):
                assert time.monotonic() < until, "it does not start"
                time.sleep(0.005)
            time.sleep(dice.random() * 1.0)
            job.kill(victim)
        finally:
            ended = job.wait(100)
        hits += ended[victim].code == -9 and flags.read_bytes()[victim]
        for end, expected in zip(ended, unbroken(kind, count, shared), strict=True):
            assert all(expected[step] == loss for step, loss in losses(end.out).items()), end
        reported = int(told.read_text() or 0) if told.exists() else 0
        there = [name for name in names(folder) if name.startswith("step-")]
        newest = int(there[-1][5:-3]) if there else 0
        assert newest >= reported
        assert all(fastserial.verify(folder / name).ok for name in there[-1:])
        assert len(there) <= 3  # one may be in place before the oldest is gone
        if newest == STEPS:
            run += 1
            count = dice.choice([2, 4])
            folder = tmp_path / f"run{run}"
    assert hits, "the kills missed the saves"
    outs = ranks.run("ranks_training", count, folder, kind, STEPS, 10)
    for out, expected in zip(outs, unbroken(kind, count, shared), strict=True):
        assert all(expected[step] == loss for step, loss in losses(out).items())
    print(f"{kind}: {trials} kills, {hits} in a save")
