"""Plans of earlier saves, kept with the process group they were made for.

The ranks agree by DCP's own exchange of plans: a rank whose state is as before sends a number
instead of its rows. Whoever coordinates knows all rows that go with a number.
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import Any, Generic, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.utils import _DistWrapper

from fastserial.distributed.dcp.steps import wrapper_of_step

__all__ = ["Kept", "group_of_step", "kept_with"]

_Value = TypeVar("_Value")
_MOST = 4
_MOST_ALL = 16  # whoever coordinates never forgets what another rank may still name


class _NoGroup:
    """Stands for the group of a process that saves alone."""


ALONE = _NoGroup()
_kept: weakref.WeakKeyDictionary[Any, dict[Any, Kept[Any]]] = weakref.WeakKeyDictionary()


class Kept(Generic[_Value]):
    """What was kept by number, the oldest first. Several threads may use it at once.

    Attributes:
        asked: a number was sent, and no answer came yet.
    """

    def __init__(self, most: int) -> None:
        self.asked = False
        self._most = most
        self._clock = count()
        self._values: dict[int, tuple[int, _Value]] = {}  # each with when it was used

    def items(self) -> list[tuple[int, _Value]]:
        by_age = sorted(self._values.copy().items(), key=lambda item: item[1][0])
        return [(number, value) for number, (_, value) in by_age]

    def latest(self) -> _Value | None:
        """Return what was kept or asked for last, None if there is nothing."""
        found = self.items()
        return found[-1][1] if found else None

    def get(self, number: int) -> _Value | None:
        """Return what was kept, and count it as new."""
        found = self._values.get(number)
        if found is None:
            return None
        self.put(number, found[1])
        return found[1]

    def put(self, number: int, value: _Value) -> None:
        """Keep a value; the oldest goes if there are too many."""
        self._values[number] = next(self._clock), value
        for oldest, _ in self.items()[: -self._most]:
            self._values.pop(oldest, None)

    def clear(self) -> None:
        self._values.clear()


def kept_with(own: type[_Value], of_all: bool = False) -> Kept[_Value] | None:
    """Return what was kept with group and coordinator of this collective step, None outside of one.

    A planner is not told the group. But DCP calls it in a step that all ranks of a group do
    together, and without collectives it does not.

    Args:
        own: of which kind the values are.
        of_all: what the coordinator keeps.
    """
    step = wrapper_of_step("reduce_scatter")
    if step is None:
        return None
    most = _MOST_ALL if of_all else _MOST
    of_group = _kept.setdefault(_group_of(step), {})
    return of_group.setdefault((own, step.coordinator_rank), Kept(most))


def group_of_step() -> Any | None:
    """Return the process group whose step this is, `ALONE` without one, None outside of a step."""
    step = wrapper_of_step("reduce_scatter")
    return None if step is None else _group_of(step)


def _group_of(step: _DistWrapper) -> Any:
    if not step.use_dist:
        return ALONE
    return step.group if step.group is not None else dist.group.WORLD
