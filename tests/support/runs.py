"""What a run of a framework, in a process of its own, left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple


class Ran(NamedTuple):
    """Its exit status, its losses (step and value, as text), and what it said."""

    code: int
    losses: list[str]
    output: str


Run = Callable[..., Ran]
Unbroken = Callable[..., tuple[list[str], Path]]
