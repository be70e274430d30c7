"""Who writes what: every row once, by a rank that has it, and equal bytes."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from fastserial.distributed.plan.balance import Assignment, Workload, assign

MIB = 1 << 20
ALL = (0, 1, 2, 3)

SHAPES = {
    "a GPT with the embedding last": [
        *(Workload(4 * MIB * k, ALL, 1024) for k in (1, 1, 1, 4, 4) * 20),
        Workload(300 * MIB, ALL, 50257),
    ],
    "many that are not cut": [Workload(900 * 1024, ALL)] * 1000,
    "a large one that is not cut, and small ones": [
        Workload(300 * MIB, ALL),
        *[Workload(900 * 1024, ALL)] * 1024,
        Workload(1 * MIB, ALL, 64),
    ],
    "uneven shards and a replica": [
        *(Workload(100 * MIB, (rank,)) for rank in (*ALL, 0)),
        Workload(400 * MIB, ALL, 1000),
    ],
}


def check(items: list[Workload], found: list[Assignment], ranks: int) -> list[float]:
    """Check that each row is there once; return the bytes of each rank."""
    load = [0.0] * ranks
    rows: dict[int, list[tuple[int, int]]] = {}
    for number, rank, first, stop in found:
        assert rank in items[number].owners
        assert first < stop
        rows.setdefault(number, []).append((first, stop))
        load[rank] += items[number].nbytes * (stop - first) / items[number].rows
    for number, item in enumerate(items):
        cuts = sorted(rows[number])
        assert (cuts[0][0], cuts[-1][1]) == (0, item.rows)
        assert all(a[1] == b[0] for a, b in pairwise(cuts))
    return load


@pytest.mark.parametrize("name", SHAPES)
def test_all_ranks_write_as_much(name: str) -> None:
    load = check(SHAPES[name], assign(SHAPES[name], 4), 4)
    assert max(load) <= 1.05 * sum(load) / 4, load


def test_every_row_is_written_once() -> None:
    chance = random.Random(3)
    for _ in range(500):
        ranks = chance.randrange(1, 9)
        items = [
            Workload(
                chance.randrange(5 * MIB),
                tuple(sorted(chance.sample(range(ranks), chance.randrange(1, ranks + 1)))),
                chance.choice([1, 1, 7, 1000]),
            )
            for _ in range(chance.randrange(30))
        ]
        check(items, assign(items, ranks), ranks)
