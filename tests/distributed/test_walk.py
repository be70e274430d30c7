"""Nests of containers: what is found in them."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from fastserial.distributed.state.walk import leaves, states

Pair = namedtuple("Pair", "first second")


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
