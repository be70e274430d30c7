"""Who writes what: all of the file, page by page, in equal shares, and of those what it has."""

from __future__ import annotations

import random
from itertools import pairwise

from fastserial.distributed.division import GRAIN, FileRun, divide


def random_runs(chance: random.Random, nbytes: int, ranks: int) -> list[FileRun]:
    ends = sorted(chance.sample(range(nbytes + 1), min(nbytes, chance.randrange(30))))
    return [
        FileRun(first, stop, tuple(sorted(chance.sample(range(ranks), chance.randint(1, ranks)))))
        for first, stop in pairwise(ends)
        if chance.random() < 0.8
    ]


def test_all_of_the_file_in_equal_shares() -> None:
    chance = random.Random(3)
    for _ in range(300):
        ranks = chance.randint(1, 9)
        nbytes = chance.choice([1, GRAIN, chance.randrange(1, 300 * GRAIN)])
        writers = sorted(chance.sample(range(ranks), chance.randint(1, ranks)))
        owned = divide(nbytes, random_runs(chance, nbytes, ranks), writers)
        at = 0
        written = dict.fromkeys(writers, 0)
        for first, stop, owner in owned:
            assert first == at < stop
            assert first % GRAIN == 0
            written[owner] += -(-(stop - first) // GRAIN)
            at = stop
        assert at == nbytes
        assert max(written.values()) - min(written.values()) <= 1


def test_a_rank_writes_what_it_has() -> None:
    """Of rows sharded over four ranks, only the blocks at the edges change hands."""
    rows, ranks = 1000 * GRAIN + 64, 4
    part = rows // ranks
    runs = [FileRun(rank * part, (rank + 1) * part, (rank,)) for rank in range(ranks)]
    owned = divide(rows, runs, range(ranks))
    alien = sum(
        min(stop, run.stop) - max(first, run.first)
        for first, stop, owner in owned
        for run in runs
        if owner not in run.ranks and max(first, run.first) < min(stop, run.stop)
    )
    assert alien <= 2 * ranks * GRAIN
