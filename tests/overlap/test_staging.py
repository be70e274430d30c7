"""Memory for copies is used again, and no more of it is kept than was in use."""

from __future__ import annotations

import random

from fastserial.overlap.staging import HostRegion, Staging

MiB = 1024 * 1024


def test_another_size_does_not_cost_a_kept_region() -> None:
    """As with a save in place, which copies little, between two that copy all."""
    staging = Staging()
    large = staging.take(40 * MiB)
    staging.give(large)
    small = staging.take(MiB // 2)
    assert small is not large
    staging.give(small)
    assert staging.take(40 * MiB) is large
    assert staging.take(MiB // 2) is small


def test_no_more_is_kept_than_was_in_use(dice: random.Random) -> None:
    staging, most = Staging(), 0
    used: list[HostRegion] = []
    for _ in range(300):
        if len(used) == 2 or (used and dice.random() < 0.5):
            staging.give(used.pop())
        else:
            used.append(staging.take(dice.choice([1, 5, 30, 31, 64]) * MiB + dice.randrange(9999)))
        most = max(most, sum(region.nbytes for region in used))
        assert sum(region.nbytes for region in used) <= staging.held <= most + 8 * MiB
