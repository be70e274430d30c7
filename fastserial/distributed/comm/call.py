"""Which collective call a rank makes: ranks that make different ones must hear it.

Connections deliver what a rank sends to whatever call the other rank is in. So before anything
else the ranks compare their calls: two steps never get into one file because a rank skipped or
repeated a call.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from fastserial.errors import ConfigError
from fastserial.interrupts import ours

_SHOWN = 10  # ranks in an error
# Keys under which a training program keeps how far it has come.
STEPS = ("step", "global_step", "epoch", "iteration")


class RankCall(NamedTuple):
    """A collective call, as its ranks compare it.

    Attributes:
        name: of the function.
        path: as the user gave it; empty if each rank may give its own, or if it is none: then
            only that rank's own error says so.
        target: the absolute path.
        steps: what the state says of the step, such as `("step", 100)`.
    """

    name: str
    path: str = ""
    target: str = ""
    steps: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        of = [repr(self.path)] if self.path else []
        steps = [f"{key}={step}" for key, step in self.steps]
        given = [*of, *steps]
        return f"{self.name}({', '.join(given)})" if given else self.name

    def is_same(self, other: RankCall) -> bool:
        """Return whether two ranks make one call: of one kind, for one file, of one step.

        A step that only one of them has, as values of rank 0 and entries of each rank are, says
        nothing.
        """
        theirs = dict(other.steps)
        if self.name != other.name or any(theirs.get(key, one) != one for key, one in self.steps):
            return False
        if not (self.path and other.path):
            return True
        return self.path == other.path or self.target == other.target


def call_of(name: str, path: object = "", state: object = None) -> RankCall:
    """Return the call that this rank makes. It raises nothing: what is wrong is found later.

    Args:
        name: of the function.
        path: of the file that all ranks write; empty if each rank may give its own.
        state: what is saved: a step in the outer two levels of its dictionaries is compared.
    """
    text = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else ""
    try:
        target = os.path.abspath(text) if text else ""
    except ours(OSError):  # the working directory was removed
        target = text
    return RankCall(name, text, target, tuple(_steps_in(state)))


def refuse_unconnected_rank() -> None:
    """Raise if this process is one of several that were launched together, but not connected.

    Raises:
        ConfigError: each rank would write its own state to the same file.
    """
    count = os.environ.get("WORLD_SIZE", "")
    if "RANK" in os.environ and count.isdecimal() and int(count) > 1:
        raise ConfigError(
            f"this is one of {count} processes (WORLD_SIZE), and each would save its own state to "
            "the same files, or load alone: call torch.distributed.init_process_group() before. A "
            "process that is to save or load alone removes WORLD_SIZE from os.environ"
        )


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return "rank 1", "ranks 1, 2"; of very many the first ones."""
    text = ", ".join(map(str, ranks[:_SHOWN])) + (", …" if len(ranks) > _SHOWN else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _steps_in(state: object, depth: int = 2) -> list[tuple[str, int]]:
    """Return what a state says of its step, such as `("trainer.epoch", 3)`."""
    found: list[tuple[str, int]] = []
    if type(state) is not dict or not depth:
        return found
    found += [(key, state[key]) for key in STEPS if type(state.get(key)) is int]
    for key, value in state.items():
        if type(key) is str:
            found += [(f"{key}.{inner}", step) for inner, step in _steps_in(value, depth - 1)]
    return found
