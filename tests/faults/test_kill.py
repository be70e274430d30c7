"""kill -9 at random moments of a save: the target is the old checkpoint or the new one, whole.

At least half of the kills must come while a save runs.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest
from states import check, is_whole, listing, size_of
from victims import Victim, Zygote

pytestmark = pytest.mark.timeout(3600)


def kill_soon(victim: Victim, dice: random.Random) -> None:
    victim.await_line("start")
    time.sleep(dice.uniform(0, dice.choice([0.005, 0.05, 0.2])))
    victim.kill()


@pytest.mark.trials(8, 320)
def test_kill(
    tmp_path: Path, zygote: Zygote, dice: random.Random, counts: Counter[str], trials: int
) -> None:
    newest = {}
    hits = 0
    for trial in range(trials):
        zipped, named = bool(trial % 2), bool(trial // 2 % 2)
        path = tmp_path / ("zip.pt" if zipped else "legacy.pt")
        job = {"zipped": zipped, "named": named, "nbytes": size_of(dice)}
        if path.name not in newest:
            assert zygote.start(path, 1, 1, **job).wait() == 0
            newest[path.name] = 1
        before = newest[path.name]

        victim = zygote.start(path, before + 1, 10_000, **job)
        kill_soon(victim, dice)
        hits += victim.is_saving()

        returned = victim.last("done") or before
        begun = victim.last("start")
        assert begun is not None
        found = check(path)
        assert returned <= found <= begun, (returned, found, begun)
        counts["new file whole" if found > returned else "old file whole"] += 1

        strays = set(listing(tmp_path)) - set(newest)
        counts["temporary files left and removed by the next save"] += len(strays)
        assert all(".fastserial-" in name for name in strays)
        assert zygote.start(path, found + 1, 1, **job).wait() == 0
        assert set(listing(tmp_path)) == set(newest)
        newest[path.name] = check(path)
        assert newest[path.name] == found + 1
    assert hits >= trials // 2


def test_the_kills_tear_what_is_overwritten(
    tmp_path: Path, zygote: Zygote, dice: random.Random
) -> None:
    """The control: without a new file and a rename the same kills leave torn files.

    How many do depends on the disk, since a file that only waits for its sync is whole.
    """
    path, job = tmp_path / "x.pt", {"nbytes": 9_000_000}
    torn = 0
    for _ in range(60):
        assert zygote.start(path, 1, 1, **job).wait() == 0
        kill_soon(zygote.start(path, 2, 10_000, unguarded=True, **job), dice)
        torn += not is_whole(path)
        if torn == 2:
            return
    pytest.fail(f"60 kills left {torn} torn files")
