"""Who writes what: every row once, equal bytes."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from fastserial.distributed.plan.balance import Assignment, Workload, assign

MIB = 1 << 20
ALL = (0, 1, 2, 3)

SHAPES = {
    "64 equal tensors": [Workload(16 * MIB, ALL, 4096)] * 64,
    "a GPT with the embedding last": [
        *(Workload(4 * MIB * k, ALL, 1024) for k in (1, 1, 1, 4, 4) * 20),
        Workload(300 * MIB, ALL, 50257),
    ],
    "one tensor": [Workload(1024 * MIB, ALL, 1024)],
    "DDP and Adam": [Workload(16 * MIB, ALL, 4096), Workload(4, ALL), Workload(4, ALL)] * 64,
    "many that are not cut": [Workload(900 * 1024, ALL)] * 1000,
    "uneven shards and a replica": [
        *(Workload(100 * MIB, (rank,)) for rank in ALL),
        Workload(100 * MIB, (0,)),
        Workload(400 * MIB, ALL, 1000),
    ],
    "HSDP": [
        *(Workload(16 * MIB, (0, 2), 1024) for _ in range(20)),
        *(Workload(16 * MIB, (1, 3), 1024) for _ in range(20)),
        Workload(50 * MIB, ALL, 1000),
    ],
}


def loads(items: list[Workload], found: list[Assignment], ranks: int) -> list[float]:
    load = [0.0] * ranks
    for number, rank, first, stop in found:
        load[rank] += items[number].nbytes * (stop - first) / items[number].rows
    return load


def check(items: list[Workload], found: list[Assignment]) -> None:
    rows: dict[int, list[tuple[int, int]]] = {}
    for number, rank, first, stop in found:
        assert rank in items[number].owners
        assert first < stop
        rows.setdefault(number, []).append((first, stop))
    for number, item in enumerate(items):
        cuts = sorted(rows[number])
        assert (cuts[0][0], cuts[-1][1]) == (0, item.rows)
        assert all(a[1] == b[0] for a, b in pairwise(cuts))


@pytest.mark.parametrize("name", SHAPES)
def test_all_ranks_write_as_much(name: str) -> None:
    items = SHAPES[name]
    found = assign(items, 4)
    check(items, found)
    load = loads(items, found, 4)
    assert max(load) <= 1.05 * sum(load) / 4, load


def test_every_row_is_written_once_by_a_rank_that_has_it() -> None:
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
        check(items, assign(items, ranks))
