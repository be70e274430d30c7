"""What the ranks of the program `train` said."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from support.processes import Ended

Said = list[dict[str, Any]]
Launch = Callable[..., Said]


def parsed(ended: Sequence[Ended], code: int = 0) -> Said:
    """What they printed as JSON. Each must have ended with this status."""
    said: Said = []
    for rank, one in enumerate(ended):
        assert one.code == code, one.err[-4000:]
        said += [json.loads(line[1:]) for line in one.out.splitlines() if line[:1] == "@"]
        said.append({"rank": rank, "stderr": one.err[-4000:]})
    return said


def losses(said: Said) -> dict[tuple[int, int], str]:
    """The loss of each rank and step, exactly."""
    return {(line["rank"], line["step"]): line["loss"] for line in said if "step" in line}


def having(said: Said, key: str) -> Said:
    """The lines that have a key, by rank."""
    return sorted((line for line in said if key in line), key=lambda line: line["rank"])
