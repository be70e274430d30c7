"""`load_into` fills whatever `load_state_dict` accepts: hooks, conversions, extra states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
from support.identity import digest
from support.own_loading import CASES, Hooked, Versioned, norm, spoilt, without
from torch import nn

import fastserial
from fastserial import LoadMismatchError, load_into

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning", "ignore:.*Lazy")


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


def test_integers_beside_a_module_are_left_out(tmp_path: Path) -> None:
    """Beside keys that begin with the name of a part."""
    saved = norm()
    flat = {
        f"model.{name}": one for name, one in without("num_batches")(saved.state_dict()).items()
    }
    torch.save({7: torch.ones(2), **flat}, tmp_path / "a.pt")
    ours = spoilt(norm())
    load_into(ours, tmp_path / "a.pt", key="model")
    assert torch.equal(ours[0].weight, saved[0].weight)  # type: ignore[index]
