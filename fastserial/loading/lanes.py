"""The order in which a cold file is read through the page cache: a few lanes side by side.

The kernel reads ahead of whoever reads a descriptor in order, into large folios. Threads that
share a descriptor read in no order. So the file is cut into spans, each is read in order on the
descriptor of its lane, and the lanes take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from fastserial.config.performance import LANE_SPAN

__all__ = ["in_turns", "lane_of"]


class _Placed(Protocol):
    @property
    def offset(self) -> int: ...


_T = TypeVar("_T", bound=_Placed)


def lane_of(offset: int, lanes: int) -> int:
    """Return the lane of a byte of the file."""
    return offset // LANE_SPAN % lanes


def in_turns(blocks: Iterable[_T | None], lanes: int) -> Iterator[_T]:
    """Yield blocks that come in the order of the file so that the lanes take turns.

    Args:
        blocks: what is to be read; None: nothing more is known now, what is held back must come.
        lanes: how many there are.
    """
    held: list[deque[_T]] = [deque() for _ in range(lanes)]
    group = -1

    def turns() -> Iterator[_T]:
        while any(held):
            for lane in held:
                if lane:
                    yield lane.popleft()

    for block in blocks:
        if block is None:
            yield from turns()
            continue
        number = block.offset // (LANE_SPAN * lanes)
        if number != group:
            yield from turns()
            group = number
        held[lane_of(block.offset, lanes)].append(block)
    yield from turns()
