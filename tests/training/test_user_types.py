"""Values of the user's own types in a state: what reads in another way than a dictionary stays
what it is, as with torch.save, and no code of theirs runs for us."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastserial
from fastserial import distributed


class Interpolating(MutableMapping[str, Any]):
    """Reads as OmegaConf's: `${name}` is the value of an entry, `???` is an error."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def __getitem__(self, key: str) -> Any:
        value = self.content[key]
        if value == "???":
            raise LookupError(f"Missing mandatory value: {key}")
        if isinstance(value, str) and value.startswith("${"):
            return self[value[2:-1]]
        return Interpolating(value) if isinstance(value, dict) else value

    def __setitem__(self, key: str, value: Any) -> None:
        self.content[key] = value

    def __delitem__(self, key: str) -> None:
        del self.content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


class Attributes(dict[str, Any]):
    """Its entries are attributes; others raise KeyError, as in many a hand-written one."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self[name]


class Lazy:
    """Builds an object at the first access; not before the training needs it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError("it was built")


class Building(dict[str, Any]):
    """Builds its entries when it is read, as mmengine's configuration does."""

    def items(self) -> Any:
        raise RuntimeError("it was built")

    def __reduce__(self) -> Any:
        return _building, (list(dict.items(self)),)


def _building(items: Any) -> Building:
    return Building(items)


def content_of(value: Any) -> Any:
    if isinstance(value, Interpolating):
        return value.content
    return dict(dict.items(value)) if isinstance(value, dict) else vars(value)


VALUES = {
    "interpolation": lambda: Interpolating({"lr": 0.1, "opt": "${lr}", "n": {"lr": "${lr}"}}),
    "missing": lambda: Interpolating({"lr": "???", "n": 1}),
    "unresolvable": lambda: Interpolating({"home": "${nowhere}"}),
    "attributes": lambda: Attributes(lr=0.1, names=["a", "b"]),
    "lazy": Lazy,
    "building": lambda: Building(lr=0.1),
}


@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("nested", [False, True])
def test_checkpointer(make: Any, nested: bool, tmp_path: Path) -> None:
    def state_of(value: Any) -> dict[str, Any]:
        return {"cfg": {"inside": [value]} if nested else value, "model": nn.Linear(2, 2)}

    def found(state: Mapping[str, Any]) -> Any:
        return state["cfg"]["inside"][0] if nested else state["cfg"]

    value = make()
    torch.save({"cfg": value}, tmp_path / "stock.pt")
    stock = torch.load(tmp_path / "stock.pt", weights_only=False)["cfg"]
    with fastserial.Checkpointer(
        tmp_path / "run", state_of(value), weights_only=False
    ) as checkpointer:
        checkpointer.save(1)
    state = state_of(make())
    with fastserial.Checkpointer(tmp_path / "run", state, weights_only=False) as checkpointer:
        assert checkpointer.resume() == 1
    assert type(found(state)) is type(stock)
    assert content_of(found(state)) == content_of(stock)


@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
def test_distributed_save(make: Any, tmp_path: Path) -> None:
    state = {"cfg": make(), "weight": torch.ones(3)}
    stock, ours = tmp_path / "stock" / "x.pt", tmp_path / "ours" / "x.pt"
    for path in (stock, ours):
        path.parent.mkdir()
    torch.save(state, stock)
    distributed.save(state, ours)
    assert ours.read_bytes() == stock.read_bytes()


@pytest.mark.parametrize("make", VALUES.values(), ids=VALUES)
def test_load_into(make: Any, tmp_path: Path) -> None:
    """A value that is no tensor is not changed, nor read."""
    value = make()
    before = dict(content_of(value))
    torch.save({"weight": torch.ones(3)}, tmp_path / "weight.pt")
    target = {"cfg": value, "weight": torch.zeros(3)}
    fastserial.load_into(target, tmp_path / "weight.pt")
    assert torch.equal(target["weight"], torch.ones(3))
    assert target["cfg"] is value
    assert content_of(value) == before


@pytest.mark.parametrize("kind", [Attributes, Interpolating, dict])
def test_a_mapping_with_a_model_in_it(kind: Any, tmp_path: Path) -> None:
    """A container of the user's own is looked into where it holds what has a state."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    state = {"all": kind({"model": model})}
    with fastserial.Checkpointer(tmp_path, state, weights_only=False) as checkpointer:
        checkpointer.save(1)
    assert state["all"]["model"] is model
    state = {"all": kind({"model": other})}
    with fastserial.Checkpointer(tmp_path, state, weights_only=False) as checkpointer:
        assert checkpointer.resume() == 1
    assert type(state["all"]) is kind
    assert state["all"]["model"] is other
    assert torch.equal(other.weight, model.weight)


def test_a_module_without_a_state(tmp_path: Path) -> None:
    """A loss beside the model."""
    state = {"loss": nn.CrossEntropyLoss(), "model": nn.Linear(2, 2)}
    distributed.save(state, tmp_path / "a.pt")
    found = torch.load(tmp_path / "a.pt")
    assert found["loss"] == {}
    other = {"loss": nn.CrossEntropyLoss(), "model": nn.Linear(2, 2)}
    distributed.load(tmp_path / "a.pt", into=other)
    assert torch.equal(other["model"].weight, state["model"].weight)


def test_omegaconf(tmp_path: Path) -> None:
    omegaconf: Any = pytest.importorskip("omegaconf")
    make = omegaconf.OmegaConf.create
    content = {"lr": 0.1, "opt": {"lr": "${lr}"}, "data": "???", "home": "${oc.env:NOT_SET}"}
    with fastserial.Checkpointer(
        tmp_path, {"cfg": make(content)}, weights_only=False
    ) as checkpointer:
        checkpointer.save(1)
    state = {"cfg": make(content)}
    with fastserial.Checkpointer(tmp_path, state, weights_only=False) as checkpointer:
        assert checkpointer.resume() == 1
    assert omegaconf.OmegaConf.to_container(state["cfg"], resolve=False) == content
