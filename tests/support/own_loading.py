"""Modules whose `load_state_dict` does more than to fill memory, and files for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm


class Versioned(nn.Linear):
    """Converts files of its first version, in which weights were ten times as large."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, versions: Any, *rest: Any) -> None:
        if versions.get("version", 1) < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] / 10
        super()._load_from_state_dict(state, prefix, versions, *rest)


class Extra(nn.Linear):
    value: Any = None

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


class Hooked(nn.Module):
    """Keeps a number in its state, and renames a key."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 3), 1.0
        self._register_state_dict_hook(_store)
        self._register_load_state_dict_pre_hook(self._take)

    def _take(self, state: Any, prefix: str, *rest: Any) -> None:
        self.scale = float(state.pop(f"{prefix}scale", 0.0))
        for name in [name for name in state if name.startswith(f"{prefix}old.")]:
            state[name.replace("old.", "layer.")] = state.pop(name)


def _store(module: Any, state: Any, prefix: str, _: Any) -> None:
    state[f"{prefix}scale"] = torch.tensor(module.scale)


class Half(nn.Module):
    """Its state is a copy in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def _save_to_state_dict(self, state: Any, prefix: str, keep: bool) -> None:
        state[f"{prefix}weight"] = self.weight.detach().half()


class Loading(NamedTuple):
    """A module, and a file for it."""

    make: Callable[[], nn.Module]
    change: Callable[[Any], Any] = lambda state: state


def without(*words: str) -> Callable[[Any], Any]:
    def change(state: Any) -> Any:
        return {key: value for key, value in state.items() if not any(w in key for w in words)}

    return change


def renamed(**names: str) -> Callable[[Any], Any]:
    def change(state: Any) -> Any:
        return {names.get(key, key): value for key, value in state.items()}

    return change


def extra(value: Any) -> Loading:
    def make() -> nn.Module:
        module = Extra(2, 2)
        module.value = copy.deepcopy(value)
        return module

    return Loading(make)


def norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


CASES = {
    "BatchNorm": Loading(norm),
    "old BatchNorm": Loading(norm, without("num_batches")),
    "old weight_norm": Loading(
        lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
        lambda state: {
            "bias": state["bias"],
            "weight_g": state["parametrizations.weight.original0"],
            "weight_v": state["parametrizations.weight.original1"],
        },
    ),
    "weight_norm": Loading(lambda: weight_norm(nn.Linear(3, 3))),
    "spectral_norm": Loading(lambda: spectral_norm(nn.Linear(3, 3))),
    "lazy": Loading(
        lambda: nn.Sequential(nn.LazyLinear(3)),
        lambda _: nn.Sequential(nn.Linear(2, 3)).state_dict(),
    ),
    "one element": Loading(
        lambda: nn.ParameterDict({"a": nn.Parameter(torch.randn(()))}),
        lambda state: {"a": state["a"].reshape(1)},
    ),
    "version 1": Loading(lambda: Versioned(2, 2), dict),
    "version 2": Loading(lambda: Versioned(2, 2)),
    "inside, version 2": Loading(lambda: nn.Sequential(Versioned(2, 2))),
    "hooked": Loading(Hooked),
    "hooked, old names": Loading(Hooked, renamed(**{"layer.weight": "old.weight"})),
    "half": Loading(Half),
    "extra tensor": extra(torch.randn(3)),
    "extra dictionary": extra({"a": torch.randn(2), "n": [1, 2]}),
    "extra bytes": extra(b"abc"),
}


def spoilt(module: nn.Module) -> nn.Module:
    for one in [*module.parameters(), *module.buffers()]:
        if not torch.nn.parameter.is_lazy(one):
            one.data.zero_()
    if isinstance(module, Extra):
        module.value = None
    return module
