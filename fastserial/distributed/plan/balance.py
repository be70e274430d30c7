"""Which rank writes what several have, or reads what several want: equal bytes for all.

What only one rank has, or wants, is its own. The rest is assigned in groups of items with the same
owners, those with few owners first: each group fills its owners up to the same level.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

_LEAST = 64 * 1024  # bytes of a piece; cutting smaller ones gains nothing


class Workload(NamedTuple):
    """Something to be written or read once.

    Attributes:
        nbytes: of it.
        owners: ranks that have it, or want it, in order.
        rows: number of equal parts into which it may be cut; 1: not at all.
    """

    nbytes: int
    owners: tuple[int, ...]
    rows: int = 1


class Assignment(NamedTuple):
    """Rows [first, stop) of an item, and the rank that writes or reads them."""

    item: int
    rank: int
    first: int
    stop: int


def assign(items: Sequence[Workload], ranks: int, before: Sequence[int] = ()) -> list[Assignment]:
    """Return which rank writes or reads what; every row of every item once.

    Args:
        items: to be written.
        ranks: how many there are.
        before: bytes that each rank writes already; by default none.
    """
    load = list(before) or [0] * ranks
    groups: dict[tuple[int, ...], list[int]] = {}
    found: list[Assignment] = []
    for number, item in enumerate(items):
        if len(item.owners) == 1:
            load[item.owners[0]] += item.nbytes
            found.append(Assignment(number, item.owners[0], 0, item.rows))
        else:
            groups.setdefault(item.owners, []).append(number)
    for owners in sorted(groups, key=lambda owners: (len(owners), owners)):
        numbers = groups[owners]
        total = sum(items[number].nbytes for number in numbers)
        room = _rooms([load[rank] for rank in owners], total)
        for share in _given_out(items, numbers, owners, room):
            item = items[share.item]
            load[share.rank] += item.nbytes * (share.stop - share.first) // item.rows
            found.append(share)
    found.sort()
    return found


def _rooms(loads: Sequence[int], total: int) -> list[int]:
    """Return how many bytes each rank gets so that all reach the same level, if they can."""
    ordered = sorted(loads)
    level, rest = ordered[0], total
    for count, load in enumerate(ordered[1:], 1):
        step = min(rest, (load - level) * count)
        level += step // count
        rest -= step
        if not rest:
            break
    else:
        level += -(-rest // len(loads))
    return [max(0, level - load) for load in loads]


def _given_out(
    items: Sequence[Workload],
    numbers: Sequence[int],
    owners: Sequence[int],
    room: list[int],
) -> list[Assignment]:
    """Give out what cannot be cut, the largest first; then the rest, in its order.

    Small items stay with their neighbours: a reader reads along the gaps between its items.
    """
    found: list[Assignment] = []
    most = [(-free, at) for at, free in enumerate(room)]
    heapify(most)
    large = {
        number for number in numbers if items[number].rows == 1 and items[number].nbytes > _LEAST
    }
    for number in sorted(large, key=lambda number: (-items[number].nbytes, number)):
        at = most[0][1]
        room[at] -= items[number].nbytes
        heapreplace(most, (-room[at], at))
        found.append(Assignment(number, owners[at], 0, 1))
    at, last = 0, len(owners) - 1
    for number in (number for number in numbers if number not in large):
        item = items[number]
        first, row = 0, max(1, item.nbytes) / item.rows
        while first < item.rows:
            while at < last and room[at] < _LEAST:
                at += 1
            stop = min(item.rows, first + max(1, round(room[at] / row)))
            if at == last or (item.rows - stop) * row < _LEAST:
                stop = item.rows
            found.append(Assignment(number, owners[at], first, stop))
            room[at] -= int((stop - first) * row)
            first = stop
    return found
