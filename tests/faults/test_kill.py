"""kill -9 at random moments of a save: the target is the old checkpoint or the new one, whole.

At least half of the kills must come while a save runs.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from states import check, is_whole, listing, size_of
from victims import Zygote

pytestmark = pytest.mark.timeout(3600)

SECONDS = (0.005, 0.05, 0.2)


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
        victim.kill_in_a_save(dice, *SECONDS)
        hits += victim.is_saving()
        found = victim.left(before)
        is_new = found > (victim.last("done") or before)
        counts["new file whole" if is_new else "old file whole"] += 1

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
        zygote.start(path, 2, 10_000, unguarded=True, **job).kill_in_a_save(dice, *SECONDS)
        torn += not is_whole(path)
        if torn == 2:
            return
    pytest.fail(f"60 kills left {torn} torn files")
