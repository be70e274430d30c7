"""Who writes what: all of the file, page by page, in equal shares, and of those what it has."""

from __future__ import annotations

import random
from itertools import pairwise

from fastserial.distributed.plan.division import divide


def random_runs(chance: random.Random, blocks: int, ranks: int) -> list[list[tuple[int, ...]]]:
    ends = sorted(chance.sample(range(blocks + 1), min(blocks, chance.randrange(30))))
    lists: list[list[tuple[int, ...]]] = [[], [], []]
    for first, stop in pairwise(ends):
        kind = chance.randrange(4)
        if kind < 3:
            count = 1 if kind == 0 else chance.randint(1, ranks)
            lists[kind].append((first, stop, tuple(sorted(chance.sample(range(ranks), count)))))
    return lists


def test_every_block_once_and_to_each_what_it_shall_have() -> None:
    chance = random.Random(3)
    for _ in range(300):
        ranks = chance.randint(1, 9)
        blocks = chance.choice([1, 2, chance.randrange(1, 300)])
        writers = sorted(chance.sample(range(ranks), chance.randint(1, ranks)))
        left = dict.fromkeys(writers, 0)
        for _ in range(blocks):
            left[chance.choice(writers)] += 1
        lists = random_runs(chance, blocks, ranks)
        wanted = dict(left)
        owned = divide([(0, blocks)], *lists, left)  # type: ignore[arg-type]
        at = 0
        written = dict.fromkeys(writers, 0)
        for first, stop, owner, direct in owned:
            assert first == at < stop
            written[owner] += stop - first
            at = stop
            if direct:
                runs = [*lists[0], *lists[1]]
                assert any(a <= first and stop <= b and owner in has for a, b, has in runs)
        assert at == blocks
        assert written == wanted
        assert not any(left.values())


def test_what_lies_outside_the_ranges_is_not_divided() -> None:
    left = {3: 2, 5: 3}
    owned = divide([(10, 12), (20, 23)], [(20, 21, (5,))], [], [], left)
    assert [tuple(one) for one in owned] == [
        (10, 12, 5, False),
        (20, 21, 5, True),
        (21, 23, 3, False),
    ]
