"""Plans of earlier saves of this process, by a random number that is the same on all ranks."""

from __future__ import annotations

from itertools import count
from typing import Generic, TypeVar

__all__ = ["Kept"]

_Value = TypeVar("_Value")


class Kept(Generic[_Value]):
    """What was kept by number, the oldest first. Several threads may use it at once."""

    def __init__(self, most: int) -> None:
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
