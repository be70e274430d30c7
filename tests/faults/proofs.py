"""What a proof counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Proof:
    """The counts of one row of the table."""

    name: str
    trials: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    def count(self, outcome: str, trials: int = 1) -> None:
        """Enter trials that ended as they should; what should not happen is an assertion."""
        self.trials += trials
        self.outcomes[outcome] += trials
