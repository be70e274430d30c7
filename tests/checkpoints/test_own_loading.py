"""`load_into` fills whatever `load_state_dict` accepts: hooks, conversions, extra states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch as safetensors
import torch
from support.identity import digest
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import fastserial
from fastserial import LoadMismatchError, load_into

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:.*Lazy")


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


@pytest.mark.parametrize("key", ["", "model", "outer.model"])
@pytest.mark.parametrize("case", CASES)
def test_as_load_state_dict(case: str, key: str, tmp_path: Path) -> None:
    make, change = CASES[case]
    torch.manual_seed(1)
    path = tmp_path / "file.pt"
    state = change(make().state_dict())
    nest: Any = {"model": state, "other": {"x": torch.ones(3)}}
    torch.save({"": state, "model": nest, "outer.model": {"outer": nest, "n": 5}}[key], path)
    torch.manual_seed(2)
    stock, ours = spoilt(make()), spoilt(make())
    loaded = torch.load(path)
    for name in filter(None, key.split(".")):
        loaded = loaded[name]
    stock.load_state_dict(loaded)
    assert load_into(ours, path, key=key) == fastserial.checkpoints.load_into.LoadedKeys([], [])
    assert digest(ours.state_dict()) == digest(stock.state_dict())
    if isinstance(ours, Hooked):
        assert ours.scale == stock.scale == 1.0  # type: ignore[union-attr]


def test_safetensors(tmp_path: Path) -> None:
    saved, ours = norm(), norm()
    state = without("num_batches")(saved.state_dict())
    safetensors.save_file(state, tmp_path / "a.safetensors")
    load_into(ours, tmp_path / "a.safetensors")
    assert torch.equal(ours[0].weight, saved[0].weight)  # type: ignore[index]


def test_a_module_beside_others_under_flat_names(tmp_path: Path) -> None:
    whole, part = nn.Sequential(nn.Linear(2, 2), norm()), norm()
    torch.save({"model": whole.state_dict()}, tmp_path / "a.pt")
    load_into(part, tmp_path / "a.pt", key="model.1")
    assert digest(part.state_dict()) == digest(whole[1].state_dict())
    torch.save({"model": without("num_batches")(whole.state_dict())}, tmp_path / "a.pt")
    load_into(spoilt(part), tmp_path / "a.pt", key="model.1")
    assert torch.equal(part[0].weight, whole[1][0].weight)  # type: ignore[index]


@pytest.mark.parametrize("strict", [True, False])
def test_what_torch_refuses(strict: bool, tmp_path: Path) -> None:
    """The class of the error is ours; keys without a partner are returned."""
    torch.save(nn.Sequential(nn.Linear(2, 2), nn.Linear(3, 3)).state_dict(), tmp_path / "a.pt")
    target = nn.Sequential(Versioned(2, 2), nn.BatchNorm1d(3))
    if strict:
        with pytest.raises(LoadMismatchError, match=r"Missing key\(s\).*1.running_mean"):
            load_into(target, tmp_path / "a.pt")
    else:
        torch.save({"0.weight": torch.ones(2, 2), "x": torch.ones(1)}, tmp_path / "a.pt")
        left = load_into(target, tmp_path / "a.pt", strict=False)
        assert "1.running_mean" in left.missing_keys
        assert left.unexpected_keys == ["x"]
