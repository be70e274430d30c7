"""What the ranks of `train.py` said."""

from __future__ import annotations

from typing import Any

Said = list[dict[str, Any]]


def losses(said: Said) -> dict[tuple[int, int], str]:
    """The loss of each rank and step, exactly."""
    return {(line["rank"], line["step"]): line["loss"] for line in said if "step" in line}


def check_exit(said: Said, code: int = 0) -> None:
    """Every rank ended with this status."""
    for line in said:
        if "exit" in line:
            assert line["exit"] == code, line["stderr"]


def having(said: Said, key: str) -> Said:
    """The lines that have a key, by rank."""
    return sorted((line for line in said if key in line), key=lambda line: line["rank"])
