"""States that change from save to save: some tensors, some of a tensor, or the structure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

_CHANGES = ("nothing", "some", "some", "one element", "all", "insert", "remove", "resize", "number")
_SIZES = (70_000, 99_999, 131_072, 400_001, 1 << 20, (1 << 20) + 8)


def noise(dice: random.Random, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(dice.randbytes(nbytes)), dtype=torch.uint8)


def states(dice: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Yield states, each made of the one before in place."""
    tensors = {f"t{i}": noise(dice, dice.choice(_SIZES)) for i in range(dice.randint(1, 6))}
    state: dict[str, Any] = {"number": 0, "small": torch.arange(100), "tensors": tensors}
    for number in range(count):
        if number:
            _change(dice, state, dice.choice(_CHANGES))
        yield state


def _change(dice: random.Random, state: dict[str, Any], what: str) -> None:
    tensors: dict[str, torch.Tensor] = state["tensors"]
    name = dice.choice(list(tensors))
    if what == "number":
        state["number"] = dice.choice([1, 300, 70_000, 1 << 40, "long" * 50])
    elif what == "one element":
        tensors[name][dice.randrange(len(tensors[name]))] += 1
    elif what == "insert":
        made = {f"new{dice.random()}": noise(dice, dice.choice(_SIZES)), **tensors}
        state["tensors"] = made if dice.random() < 0.5 else dict(reversed(made.items()))
    elif what == "remove" and len(tensors) > 1:
        del tensors[name]
    elif what == "resize":
        tensors[name] = noise(dice, dice.choice(_SIZES))
    else:
        some = {"some": dice.sample(list(tensors), (len(tensors) + 1) // 2), "all": list(tensors)}
        for one in some.get(what, []):
            tensors[one].copy_(noise(dice, len(tensors[one])))
