"""Memory for copies is used again, and no more of it is kept than was in use."""

from __future__ import annotations

import random

from fastserial.overlap.staging import HostRegion, Staging

MiB = 1024 * 1024


def taken(staging: Staging, nbytes: int) -> HostRegion:
    region = staging.take(nbytes, 1 << 40)
    assert region is not None
    return region


def test_another_size_does_not_cost_a_kept_region() -> None:
    """As with the two files that a DeepSpeed rank saves."""
    staging = Staging()
    large = taken(staging, 40 * MiB)
    staging.give(large)
    small = taken(staging, MiB // 2)
    assert small is not large
    staging.give(small)
    assert taken(staging, 40 * MiB) is large
    assert taken(staging, MiB // 2) is small


def test_no_more_is_kept_than_was_in_use(dice: random.Random) -> None:
    staging, most = Staging(), 0
    used: list[HostRegion] = []
    for _ in range(300):
        if len(used) == 2 or (used and dice.random() < 0.5):
            staging.give(used.pop())
        else:
            nbytes = dice.choice([1, 5, 30, 31, 64]) * MiB + dice.randrange(9999)
            used.append(taken(staging, nbytes))
        most = max(most, sum(region.nbytes for region in used))
        assert sum(region.nbytes for region in used) <= staging.held <= most + 8 * MiB
