"""A rank is killed (-9) in a save of many: the old checkpoint is there or the new one, whole."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support import ranks
from torch.distributed.checkpoint.api import CheckpointException

import fastserial
from fastserial.distributed import FastStorageReader, FastStorageWriter

FULL = os.environ.get("FASTSERIAL_DISTRIBUTED") == "full"
CONTROLS = ("stock", "unguarded")  # checkpoints that kills break

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


class Kill(NamedTuple):
    """Whether a kill hit a save, and whether what is left is whole."""

    hit: bool
    whole: bool


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("who", ["one", "dcp", *(CONTROLS if FULL else ())])
def test_killed_ranks_leave_the_old_checkpoint_or_the_new_one(tmp_path: Path, who: str) -> None:
    chance = random.Random(who)
    trials = 50 if FULL else 2
    found = [killed(chance, tmp_path / str(trial), who) for trial in range(trials)]
    hits = sum(kill.hit for kill in found)
    print(f"{who}: {trials} kills, {hits} in a save; {sum(kill.whole for kill in found)} whole")
    assert all(kill.whole for kill in found) is (who not in CONTROLS)
    assert hits >= (trials // 2 if FULL else 1), "the kills missed the saves"


def killed(chance: random.Random, folder: Path, who: str) -> Kill:
    """Kill a rank of a job that saves all the time."""
    out = folder / "out"
    out.mkdir(parents=True)
    (folder / "flags").write_bytes(bytes(4))
    count = chance.choice([2, 4])
    job = ranks.Job("ranks_die", count, folder, who)
    first = out / ("file.pt" if who == "one" else ".metadata")
    victim, ended = job.kill_somewhere(first, chance, 100)
    for rank, end in enumerate(ended):
        if rank != victim and who == "one":
            assert end.code == 0, end
            culprit, seconds = end.out.split()
            assert int(culprit) == victim, end
            assert float(seconds) < 60, "it hung"
    hit = (folder / "flags").read_bytes()[victim] == 1
    try:
        state = loaded(out, who, count)
    except (Exception, CheckpointException):  # DCP's is none of the others
        return Kill(hit, False)
    whole = all(bool(torch.all(state[key] == state["step"])) for key in ("rows", "columns", "all"))
    if who == "one":  # the next save removes what the killed one left
        fastserial.save(state, first)
        assert os.listdir(out) == ["file.pt"]
    elif who == "dcp":
        dcp.save({"step": 1}, storage_writer=FastStorageWriter(out))
        assert len(os.listdir(out)) == 2
    return Kill(hit, whole)


def loaded(out: Path, who: str, count: int) -> dict[str, Any]:
    if who == "one":
        found: dict[str, Any] = torch.load(out / "file.pt")
        return found
    state: dict[str, Any] = {
        "rows": torch.zeros(count << 18, 4),
        "columns": torch.zeros(1 << 20, count),
        "all": torch.zeros(1 << 20),
        "step": 0,
    }
    # Stock's reader shows what is there where ours would compare checksums.
    reader: Any = FastStorageReader(out) if who == "dcp" else dcp.FileSystemReader(out)
    dcp.load(state, storage_reader=reader)
    return state
