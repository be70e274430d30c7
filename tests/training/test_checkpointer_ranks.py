"""Checkpointer in a job of one or several ranks: one file a step, the same decisions on all.

The long forms (`nox -s faults`, `nox -s distributed`) kill 100 times.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import time
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from support import ranks
from support.lives import names

import fastserial
from fastserial.training import many_ranks

FULL = "full" in map(os.environ.get, ("FASTSERIAL_FAULTS", "FASTSERIAL_DISTRIBUTED"))
KINDS = ("ddp",) if torch.__version__.startswith("2.6.") else ("ddp", "fsdp")  # no FSDP2 on CPUs
PAIRS = list(product(KINDS, (2, 4)))
EVERY = 10 if FULL else 4
STEPS = 6 * EVERY
KILLS = {1: 100, 2: 30, 4: 20} if FULL else {1: 2, 2: 1}


def losses(out: str) -> dict[int, str]:
    """Each step's loss and count; the last line may be cut off."""
    lines = out.splitlines(keepends=True)
    found = [line.split() for line in lines if re.fullmatch(r"\d+ \S+ \d+\n", line)]
    return {int(step): f"{loss} {draws}" for step, loss, draws in found}


@cache
def unbroken(kind: str, count: int, folder: Path) -> list[dict[int, str]]:
    """The losses of a run that nobody disturbs, by rank."""
    folder = folder / f"unbroken-{kind}-{count}"
    return [losses(out) for out in ranks.run("ranks_training", count, folder, kind, STEPS, EVERY)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


def name_of(step: int) -> str:
    return f"step-{step:08d}.pt"


@pytest.mark.parametrize(("kind", "count"), PAIRS if FULL else [(KINDS[-1], 4)])
def test_it_goes_on_bit_for_bit(tmp_path: Path, shared: Path, kind: str, count: int) -> None:
    folder = tmp_path / "run"
    ranks.run("ranks_training", count, folder, kind, 3 * EVERY, EVERY)
    assert names(folder) == [name_of(2 * EVERY), name_of(3 * EVERY)]
    found = torch.load(folder / name_of(3 * EVERY))
    assert found["checkpointer"]["step"] == 3 * EVERY
    assert len(found["checkpointer"]["ranks"]) == count
    assert found["model"]["0.weight"].shape == (520, 520)
    outs = ranks.run("ranks_training", count, folder, kind, STEPS, EVERY)
    for out, expected in zip(outs, unbroken(kind, count, shared), strict=True):
        assert out.splitlines()[0].split() == ["start", str(3 * EVERY)]
        assert losses(out) == {step: loss for step, loss in expected.items() if step > 3 * EVERY}
    assert names(folder) == [name_of(5 * EVERY), name_of(6 * EVERY)]


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_makes_files_for_any_number(tmp_path: Path, kind: str) -> None:
    """A job of one rank has DDP's names and FSDP's shards, too."""
    for count, start in ((1, 0), (2, 2), (1, 4)):
        outs = ranks.run("ranks_training", count, tmp_path / "run", kind, start + 2, 2)
        assert {out.split()[1] for out in outs} == {str(start)}
        found = torch.load(tmp_path / "run" / name_of(start + 2))
        assert type(found["model"]["0.weight"]) is torch.Tensor
        assert found["model"]["0.weight"].shape == (520, 520)


class Killed:
    """What jobs that are killed again and again have come to.

    Attributes:
        kills: how many, `hits` of them while a checkpoint was under way.
    """

    def __init__(self, folder: Path, kind: str, count: int, shared: Path) -> None:
        self.folder, self.flags, self.told = folder / "run0", folder / "flags", folder / "told"
        self.kind, self.count, self.shared = kind, count, shared
        self.dice = random.Random(count)
        self.kills = self.hits = self.newest = 0

    def again(self) -> None:
        """Start the job, kill one rank or all at a random moment, and look what is there."""
        self.told.unlink(missing_ok=True)
        self.flags.write_bytes(bytes(self.count))
        more = (self.kind, STEPS, 1, self.flags, self.told)
        job = ranks.Job("ranks_training", self.count, self.folder, *more)
        one = self.dice.randrange(self.count)
        victims = [one] if self.dice.random() < 0.7 else list(range(self.count))
        try:
            until = time.monotonic() + 60
            while "start" not in job.out(one):
                assert time.monotonic() < until, "it does not start"
                time.sleep(0.002)
            time.sleep(self.dice.random() * (0.3 if self.count == 1 else 1.0))
            for victim in victims:
                with contextlib.suppress(ProcessLookupError):  # it has come to its end
                    job.kill(victim)
        finally:
            ended = job.wait(100)
        self.kills += ended[one].code == -9
        self.hits += ended[one].code == -9 and self.flags.read_bytes()[one]
        expected = unbroken(self.kind, self.count, self.shared)
        for end, mine in zip(ended, expected, strict=True):
            assert losses(end.out).items() <= mine.items(), end
        starts = {end.out.splitlines()[0] for end in ended if "\n" in end.out}
        assert starts == {f"start {self.newest}"}  # whole, so that nothing was warned of
        reported = int(self.told.read_text() or 0) if self.told.exists() else 0
        there = [name for name in names(self.folder) if name.startswith("step-")]
        self.newest = int(there[-1][5:-3]) if there else 0
        assert self.newest >= reported
        assert all(fastserial.verify(self.folder / name).ok for name in there[-1:])
        assert len(there) <= 3  # one may be in place before the oldest is gone
        if self.newest == STEPS:
            self.newest, self.folder = 0, self.folder.with_name(f"run{self.kills}")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "count"), [("plain", 1), *(PAIRS if FULL else PAIRS[:1])])
def test_kill(tmp_path: Path, shared: Path, kind: str, count: int) -> None:
    job = Killed(tmp_path, kind, count, shared)
    for _ in range(KILLS[count]):
        job.again()
    print(f"{kind}, {count} ranks: {job.kills} kills, {job.hits} with a checkpoint under way")
    assert job.kills
    assert job.hits or not FULL, "the kills missed the saves"
    outs = ranks.run("ranks_training", count, job.folder, kind, STEPS, EVERY)
    for out, expected in zip(outs, unbroken(kind, count, shared), strict=True):
        assert losses(out).items() <= expected.items()


def test_a_signal_is_heard_soon_after_fast_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks exchange their flags at least every 16 calls, however fast the steps before were."""
    clock = 0.0
    monkeypatch.setattr(many_ranks, "perf_counter", lambda: clock)
    made = many_ranks.ManyRanks(None, 60, None)
    for _ in range(300):
        clock += 0.001
        made.asked(0)
    waited = 0
    while not made.asked(1):
        clock += 1.0
        waited += 1
    assert waited <= 16
