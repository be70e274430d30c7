"""Checkpointer in a job of several ranks: one file a step, and the same decisions on all.

`FASTSERIAL_DISTRIBUTED=full` kills 100 times.
"""

from __future__ import annotations

import contextlib
import json
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
from programs.training.ranks_optimizers import Agent, went_on
from support import ranks

import fastserial

FULL = os.environ.get("FASTSERIAL_DISTRIBUTED") == "full"
KINDS = ("ddp",) if torch.__version__.startswith("2.6.") else ("ddp", "fsdp")  # no FSDP2 on CPUs
PAIRS = list(product(KINDS, (2, 4))) if FULL else [(KINDS[0], 2), (KINDS[-1], 4)]
EVERY = 10 if FULL else 4
STEPS = 6 * EVERY


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


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_goes_on(
    folder: Path, kind: str, count: int, shared: Path, start: int, *words: str
) -> None:
    """Run to the end, and compare each rank's losses."""
    outs = ranks.run("ranks_training", count, folder, kind, STEPS, EVERY)
    for out, expected in zip(outs, unbroken(kind, count, shared), strict=True):
        first = out.splitlines()[0]
        assert first.split()[:2] == ["start", str(start)], first
        assert all(word in first for word in words), first
        assert losses(out) == {step: loss for step, loss in expected.items() if step > start}


@pytest.mark.parametrize(("kind", "count"), PAIRS)
def test_it_goes_on_bit_for_bit(tmp_path: Path, shared: Path, kind: str, count: int) -> None:
    folder = tmp_path / "run"
    ranks.run("ranks_training", count, folder, kind, 3 * EVERY, EVERY)
    assert names(folder) == [name_of(2 * EVERY), name_of(3 * EVERY)]
    found = torch.load(folder / name_of(3 * EVERY))
    assert found["checkpointer"]["step"] == 3 * EVERY
    assert len(found["checkpointer"]["rng"]) == count
    assert found["model"]["0.weight"].shape == (520, 520)
    assert_goes_on(folder, kind, count, shared, 3 * EVERY)
    assert names(folder) == [name_of(5 * EVERY), name_of(6 * EVERY)]


DAMAGES = {
    "a bit of a tensor": lambda size: size // 2,
    "a bit of the pickle": lambda size: 300,
    "the end": lambda size: None,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_all_fall_back_from_a_damaged_file(tmp_path: Path, shared: Path, name: str) -> None:
    folder = tmp_path / "run"
    ranks.run("ranks_training", 2, folder, "ddp", 2 * EVERY, EVERY)
    newest = folder / name_of(2 * EVERY)
    text = bytearray(newest.read_bytes())
    at = DAMAGES[name](len(text))
    if at is None:
        del text[-1000:]
    else:
        text[at] ^= 1
    newest.write_bytes(text)
    assert_goes_on(folder, "ddp", 2, shared, EVERY, f"{newest.name} is damaged")


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
    assert names(folder) == [name_of(step)]


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_makes_files_for_any_number(tmp_path: Path, kind: str) -> None:
    """A job of one rank has DDP's names and FSDP's shards, too."""
    for count, start in ((1, 0), (2, 2), (1, 4)):
        outs = ranks.run("ranks_training", count, tmp_path / "run", kind, start + 2, 2)
        assert {out.split()[1] for out in outs} == {str(start)}
        found = torch.load(tmp_path / "run" / name_of(start + 2))
        assert type(found["model"]["0.weight"]) is torch.Tensor
        assert found["model"]["0.weight"].shape == (520, 520)


def test_unusual_states(tmp_path: Path) -> None:
    """See the program: containers, the user's own code, torn snapshots, memory of the node."""
    assert ranks.run("ranks_objects", 2, tmp_path) == ["same\n"] * 2
    for name in ("compiled-False", "compiled-True"):
        found = torch.load(tmp_path / "containers" / name / name_of(1))
        assert set(found["nets"][0]) == {"0.weight", "0.bias", "1.weight"}
    state = {
        "nets": [torch.nn.ModuleList([torch.nn.Linear(520, 520), torch.nn.Linear(520, 1, False)])],
        "optimizers": None,
        "values": None,
    }
    with fastserial.Checkpointer(tmp_path / "containers" / name, state) as checkpointer:
        with pytest.raises(fastserial.LoadMismatchError, match=r"nets .*: 1"):
            checkpointer.resume()  # the file has a loader, too
        state["nets"].append(None)
        assert checkpointer.resume() == 1
    assert state["nets"][0][1].weight.eq(3).all()
    assert state["nets"][1] == {"loader": {"position": 3}}


def test_an_optimizer_of_several_modules_and_a_tensor(tmp_path: Path) -> None:
    agent = Agent(1)
    with fastserial.Checkpointer(tmp_path / "alone", agent.state) as checkpointer:
        agent.step()
        checkpointer.save(1)
    for out in ranks.run("ranks_optimizers", 2, tmp_path):
        found = json.loads(out)
        assert found["went on"] == found["expected"]
        assert found["from one process"] == found["expected"]
        assert len(found["refused"]) == 2
        for text in found["refused"]:
            assert "the optimizer 'optimizer' (Adam) has a parameter of shape (1,)" in text
            assert "Put the module, or the parameter itself, beside" in text
    names_there = torch.load(tmp_path / "ranks" / name_of(1))["optimizer"]["state"].keys()
    assert {"log_alpha", "train_.weight", "critic.bias"} <= names_there
    assert went_on(tmp_path / "ranks") == found["expected"]


class Killed:
    """What jobs that are killed again and again have come to.

    Attributes:
        kills, hits: how many; how many of them while a checkpoint was under way.
    """

    def __init__(self, folder: Path, kind: str, count: int, shared: Path, seed: int) -> None:
        self.folder, self.flags, self.told = folder / "run0", folder / "flags", folder / "told"
        self.kind, self.count, self.shared = kind, count, shared
        self.dice = random.Random(seed)
        self.kills = self.hits = self.newest = 0

    def again(self) -> None:
        """Start the job, kill one rank or all at a random moment, and look what is there."""
        self.told.unlink(missing_ok=True)
        self.flags.write_bytes(bytes(self.count))
        job = ranks.Job(
            "ranks_training", self.count, self.folder, self.kind, STEPS, 1, self.flags, self.told
        )
        one = self.dice.randrange(self.count)
        victims = [one] if self.dice.random() < 0.7 else list(range(self.count))
        try:
            until = time.monotonic() + 60
            while "start" not in job.out(one):
                assert time.monotonic() < until, "it does not start"
                time.sleep(0.005)
            time.sleep(self.dice.random() * 1.0)
            for victim in victims:
                with contextlib.suppress(ProcessLookupError):  # it has come to its end
                    job.kill(victim)
        finally:
            ended = job.wait(100)
        self.kills += 1
        self.hits += ended[one].code == -9 and self.flags.read_bytes()[one]
        expected = unbroken(self.kind, self.count, self.shared)
        for end, mine in zip(ended, expected, strict=True):
            assert all(mine[step] == loss for step, loss in losses(end.out).items()), end
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
@pytest.mark.parametrize(("kind", "count"), PAIRS if FULL else PAIRS[:1])
def test_kill(tmp_path: Path, shared: Path, kind: str, count: int) -> None:
    job = Killed(tmp_path, kind, count, shared, count)
    for _ in range({2: 30, 4: 20}[count] if FULL else 1):
        job.again()
    print(f"{kind}, {count} ranks: {job.kills} kills, {job.hits} with a checkpoint under way")
    assert job.hits or not FULL, "the kills missed the saves"
    outs = ranks.run("ranks_training", count, job.folder, kind, STEPS, EVERY)
    for out, expected in zip(outs, unbroken(kind, count, shared), strict=True):
        assert all(expected[step] == loss for step, loss in losses(out).items())
