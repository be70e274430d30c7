"""Which checkpoints are kept."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from fastserial.errors import ConfigError

Best = tuple[str, Literal["min", "max"]]

_TEXT = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|h|d)")
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def seconds_of(name: str, value: object) -> float:
    """Return the seconds of a time such as "90s", "10min", "1.5h" or "2d".

    Args:
        name: of the argument, for the error.

    Raises:
        ConfigError: it is not such a time, or is zero.
    """
    found = _TEXT.fullmatch(value) if isinstance(value, str) else None
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not seconds:
        raise ConfigError(f'{name} must be a time such as "90s", "10min", "2h" or "7d": {value!r}')
    return seconds


@dataclass(frozen=True, slots=True)
class Retention:
    """The rules for the checkpoints to keep; one rule that applies is enough.

    Attributes:
        last: the number of newest ones; at least one.
        every: those whose step is a multiple.
        best: the one with the least or greatest value of a metric.
        seconds: those that are not older.
    """

    last: int
    every: int | None = None
    best: Best | None = None
    seconds: float | None = None

    def surplus(
        self,
        steps: Sequence[int],
        stale: Collection[int],
        age: Callable[[int], float],
        value: Callable[[int], float | None],
    ) -> list[int]:
        """Return the steps that may be removed.

        Args:
            steps: of the whole checkpoints, the newest first.
            stale: those among them that another run left: only `last` keeps them.
            age: returns the age of a step's file (seconds).
            value: returns a step's value of the metric; None if it has none.
        """
        mine = [step for step in steps if step not in stale]
        kept = set(sorted(steps, key=lambda step: step in stale)[: max(1, self.last)])
        if self.every is not None:
            kept.update(step for step in mine if step % self.every == 0)
        if self.seconds is not None:
            kept.update(step for step in mine if age(step) <= self.seconds)
        if self.best is not None:
            sign = 1 if self.best[1] == "min" else -1
            values = [(found, step) for step in mine if (found := value(step)) is not None]
            ranked = [(sign * found, -step) for found, step in values if not math.isnan(found)]
            kept.update(-step for _, step in sorted(ranked)[:1])
        return [step for step in steps if step not in kept]
