"""Nests of containers: what is found in them, and what they are together."""

from __future__ import annotations

import pickle
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fastserial.distributed.state.merging import LeafSpec, merged
from fastserial.distributed.state.walk import leaves, states
from fastserial.errors import LoadMismatchError

Pair = namedtuple("Pair", "first second")


class Rank:
    """A rank that hears all states so far, its own among them."""

    def __init__(self, rank: int, others: list[bytes]) -> None:
        self.rank, self.others = rank, others
        self.ranks: dict[int, int] = {}

    def decide(self, value: Any, decision: Any) -> Any:
        self.others.append(pickle.dumps(value))
        return decision(list(map(pickle.loads, self.others)))


def together(*values: Any) -> Any:
    """Return the union of several ranks' states, as the last of them has it."""
    told: list[bytes] = []
    for rank, value in enumerate(values):
        found = merged(value, Rank(rank, told))  # type: ignore[arg-type]
    return found


def test_leaves_have_names() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    nest = {"x": [a, {"y": b, 3: 5}], "z": Pair(c, a), "n": None}
    assert [name for name, _ in leaves(nest)] == ["x[0]", "x[1].y", "z[0]", "z[1]"]
    assert [name for name, _ in leaves([a, (b,)])] == ["[0]", "[1][0]"]
    assert [name for name, _ in leaves(a)] == ["the object"]
    assert not leaves(7).values


def test_a_nest_that_holds_itself() -> None:
    nest: dict[str, Any] = {"a": torch.ones(1)}
    nest["b"] = [nest, torch.ones(2)]
    assert [name for name, _ in leaves(nest)] == ["a", "b[1]"]
    assert states(nest, leaves(nest).live) is nest
    model = nn.Linear(1, 1)
    nest["c"] = (nest, model, [model, {"d": nest}])
    assert leaves(nest).live == [model]


class Rows(UserDict[str, Any]):
    """Iterates over something else than its keys, as tensordict's does."""

    def __iter__(self) -> Iterator[Any]:
        return iter((1, 2, 3))

    def items(self) -> Any:
        return self.data.items()

    def values(self) -> Any:
        return self.data.values()


def test_mappings_of_uncommon_kinds() -> None:
    a, b = torch.ones(1), torch.ones(2)
    found = leaves({"m": Rows({"x": a, "y": b})})
    assert [name for name, _ in found] == ["m.x", "m.y"]
    assert [leaf is one for (_, leaf), one in zip(found, (a, b), strict=True)] == [True, True]


def test_modules_in_a_nest_become_states() -> None:
    model = nn.Linear(2, 3)
    shared = [model, 5]
    nest = OrderedDict(a=shared, b={"c": shared, "d": Pair(1, model)}, e=[4])
    found = states(nest, leaves(nest).live)
    assert type(found) is OrderedDict
    assert found["a"] is found["b"]["c"], "what is shared stays shared"
    assert found["e"] is nest["e"], "what holds no module is not copied"
    assert list(found["a"][0]) == ["weight", "bias"]
    assert found["b"]["d"] == (1, found["a"][0])
    assert type(found["b"]["d"]) is Pair
    assert nest["a"][0] is model


def test_the_union_of_states() -> None:
    found = together({"a": 1, "l": [1, {"x": 2}]}, {"b": 2, "l": [3, {"y": 4}], "p": Pair(1, 2)})
    assert found == {"a": 1, "b": 2, "l": [1, {"x": 2, "y": 4}], "p": (1, 2)}
    assert type(found["p"]) is Pair


def test_the_union_of_tied_tensors() -> None:
    """A tensor with several keys is the same one under all of them, and each rank has it once."""
    states_ = []
    for _ in range(3):
        tensor = torch.ones(4)
        states_.append({"a": tensor, "b": tensor, "c": [tensor]})
    found = together(*states_)
    assert isinstance(found["a"], LeafSpec)
    assert found["a"] is found["b"] is found["c"][0]
    assert found["a"].ranks == [0, 1, 2]
    with pytest.raises(LoadMismatchError, match="ranks 0 and 1 have different tensors"):
        together({"a": torch.ones(4)}, {"a": torch.ones(5)})
