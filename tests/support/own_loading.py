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


class Growing(nn.Module):
    """Takes a buffer of any length, as observers of quantization do."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(2))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.seen = torch.zeros_like(state.get(f"{prefix}seen", self.seen))
        super()._load_from_state_dict(state, prefix, *rest)


class Own(nn.Linear):
    """Its own method renames a key, and takes no `strict`."""

    def load_state_dict(self, state: Any) -> Any:  # type: ignore[override]
        return super().load_state_dict(renamed(old="weight")(state))


def of_instance() -> nn.Module:
    module = nn.Linear(2, 2)
    load: Any = module.load_state_dict
    method: Any = lambda state, strict=True: load(renamed(old="weight")(state), strict)  # noqa: E731
    module.load_state_dict = method  # type: ignore[method-assign]
    return module


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


def of_version_1(state: Any) -> Any:
    state._metadata[""]["version"] = 1
    return state


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
    "version 1": Loading(lambda: Versioned(2, 2), of_version_1),
    "version 2": Loading(lambda: Versioned(2, 2)),
    "inside, version 2": Loading(lambda: nn.Sequential(Versioned(2, 2))),
    "hooked": Loading(Hooked),
    "hooked, old names": Loading(Hooked, renamed(**{"layer.weight": "old.weight"})),
    "half": Loading(Half),
    "growing": Loading(Growing, lambda _: {"seen": torch.arange(5.0)}),
    "own method": Loading(lambda: Own(2, 2), renamed(weight="old")),
    "own method, same names": Loading(lambda: Own(2, 2)),
    "own method of the instance": Loading(of_instance, renamed(weight="old")),
    "own method of a part": Loading(lambda: nn.Sequential(Own(2, 2))),
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


# -- optimizers whose state is not what torch's are ------------------------------------------------


class Asking(torch.optim.Optimizer):
    """Asks for the state of each parameter, which makes an empty one (schedulefree)."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        for group in self.param_groups:
            for parameter in group["params"]:
                assert "mean" not in self.state[parameter]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if parameter.grad is None:
                    continue
                state["mean"] = state.get("mean", 0) * 0.5 + parameter.grad
                parameter.sub_(state["mean"] * group["lr"])


class Lookahead(torch.optim.Optimizer):
    """Keeps its own state beside that of another optimizer; its state dict has no `state`."""

    def __init__(self, parameters: Any) -> None:
        self.base = torch.optim.Adam(parameters, lr=0.05, foreach=False)
        self.param_groups, self.defaults = self.base.param_groups, self.base.defaults
        self.state, self.count = self.base.state, 0
        self.slow = [one.detach().clone() for one in self.param_groups[0]["params"]]

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.base.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.base.load_state_dict(state["base"])
        self.param_groups, self.state = self.base.param_groups, self.base.state
        self.slow, self.count = state["slow"], state["count"]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        self.count += 1
        for fast, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            if self.count % 2 == 0:
                slow.lerp_(fast, 0.5)
                fast.copy_(slow)


class Counting(torch.optim.SGD):
    """Has one more entry in its state dict than torch's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]
        super().load_state_dict({key: one for key, one in state.items() if key != "count"})


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "asking": Asking,
    "lookahead": Lookahead,
    "counting": Counting,
}
