"""The tree along which ranks tell each other what all have to know."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

_FAN_OUT = 16  # messages that a rank sends at once; 16,384 ranks are four steps away
_STAR = 32  # ranks; below, each is one step away


class Neighbours(NamedTuple):
    """The ranks that one exchanges messages with: `parent` is None on rank 0."""

    parent: int | None
    children: tuple[int, ...]

    def all_but(self, rank: int | None) -> list[int]:
        """Return all of them but one."""
        every = self.children if self.parent is None else (self.parent, *self.children)
        return [one for one in every if one != rank]


def neighbours(rank: int, size: int) -> Neighbours:
    """Return the neighbours of a rank.

    A rank and all below it are consecutive ranks, that one first: what the ranks send is joined in
    their order.
    """
    parent, root, stop = None, 0, size
    while True:
        count = stop - root - 1
        parts = min(count, _FAN_OUT if size >= _STAR else size)
        children = tuple(root + 1 + count * part // parts for part in range(parts))
        if root == rank:
            return Neighbours(parent, children)
        index = bisect_right(children, rank) - 1
        parent, root, stop = root, children[index], (*children, stop)[index + 1]


def ancestors(rank: int, size: int) -> list[int]:
    """Return the ranks between a rank and rank 0, which is the last of them."""
    found: list[int] = []
    above = neighbours(rank, size).parent
    while above is not None:
        found.append(above)
        above = neighbours(above, size).parent
    return found
