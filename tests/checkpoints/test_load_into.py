"""fastserial.load_into: tensors that are already there, filled in place."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpus import MIB, noise
from support.damage import flip
from support.identity import saved
from support.limits import peak
from support.loading import FORCED, last_report
from torch import nn

import fastserial
from fastserial.checkpoints.load_into import load_into
from fastserial.errors import CorruptCheckpointError, LoadMismatchError, UnreadableTensorError


class Net(nn.Module):
    """Tied weights, buffers, a channels-last weight."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(300, 40)
        self.norm = nn.BatchNorm1d(40)
        self.conv = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
        self.head = nn.Linear(40, 300, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor(seed))
        self.register_buffer("none", None)


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("way", ["default", "direct", "cached"])
@pytest.mark.parametrize(("fmt", "verify"), [("zip", False), ("zip", True), ("legacy", False)])
def test_module(fmt: str, verify: bool, way: str, tmp_path: Path) -> None:
    source, target = Net(1), Net(2)
    path = saved(tmp_path, source.state_dict(), fmt)
    places = [one.data_ptr() for one in target.state_dict().values()]
    with fastserial.options(**FORCED.get(way, {})):
        left = load_into(target, path, verify=verify)
    assert (left.missing_keys, left.unexpected_keys) == ([], [])
    assert equal(source.state_dict(), target.state_dict())
    assert [one.data_ptr() for one in target.state_dict().values()] == places
    assert target.head.weight is target.embed.weight
    report = last_report()
    assert report.verified == verify
    assert report.container == fmt


@pytest.mark.parametrize("strict", [True, False])
def test_a_key_that_is_not_there_is_named(strict: bool, tmp_path: Path) -> None:
    path = saved(tmp_path, {"optimizer": {"w": torch.ones(2)}, "model": Net(1).state_dict()})
    with pytest.raises(LoadMismatchError) as caught:
        load_into(Net(1), path, key="modle", strict=strict)
    said = str(caught.value)
    assert "no tensor under key='modle'; there are: 'model', 'optimizer'" in said
    assert "weight" not in said


def test_nested_and_part(tmp_path: Path) -> None:
    model, optimizer_state = Net(1), [torch.randn(9), {"a": torch.randn(3)}]
    path = saved(tmp_path, {"model": model.state_dict(), "optimizer": optimizer_state, "epoch": 3})
    target = Net(5)
    load_into(target, path, key="model")
    assert equal(target.state_dict(), model.state_dict())
    empty = [torch.zeros(9), {"a": torch.zeros(3)}]
    state = {"model": Net(7).state_dict(), "optimizer": empty, "epoch": 0}
    load_into(state, path)
    assert equal(state["model"], model.state_dict())  # type: ignore[arg-type]
    assert torch.equal(empty[0], optimizer_state[0])  # type: ignore[arg-type]
    assert torch.equal(empty[1]["a"], optimizer_state[1]["a"])  # type: ignore[index, call-overload]
    assert state["epoch"] == 0


def test_keys_of_any_kind(tmp_path: Path) -> None:
    """Tuples in tuples, and long keys that differ at their ends."""
    keys = ("a", 1), ("a", ("b", 2)), ((),), ("x\"y'", "é\n", None, 1.5), 10**30, -3, "k" * 9999
    state = {key: torch.full((2,), float(at)) for at, key in enumerate((*keys, "k" * 9998))}
    path = saved(tmp_path, {"model": [state]})
    target = {"model": [{key: torch.zeros(2) for key in state}]}
    load_into(target, path)
    assert equal(target["model"][0], state)
    with fastserial.open(path) as file:
        for key, value in state.items():
            assert torch.equal(file.get_tensor(f"model.0.{key}"), value)


def test_targets_that_are_one_memory(tmp_path: Path) -> None:
    """The last one remains, as after copying one after the other."""
    path = saved(tmp_path, {"a": torch.full((900,), 1.0), "b": torch.full((900,), 2.0)})
    memory = torch.zeros(1000)
    load_into({"a": memory[:900], "b": memory[:900]}, path)
    assert torch.equal(memory, torch.cat((torch.full((900,), 2.0), torch.zeros(100))))


def test_targets_that_share_a_part_of_their_memory(tmp_path: Path) -> None:
    path = saved(tmp_path, {name: torch.ones(500) for name in ("a", "b", "c")})
    memory = torch.zeros(1000)
    target = {"a": memory[:500], "b": torch.zeros(500), "c": memory[499:999]}
    with pytest.raises(LoadMismatchError, match=r"'a' and 'c' .* share a part .*: clone"):
        load_into(target, path)
    assert not memory.any()
    target["c"] = memory[500:]
    load_into(target, path)
    assert memory.all()


@pytest.mark.parametrize("which", ["conj", "neg"])
def test_what_is_conjugated_or_negated_is_refused(which: str, tmp_path: Path) -> None:
    """In the file and in the target: its bytes are not what it shows."""
    lazy = torch.ones(7, dtype=torch.complex64).conj()
    lazy = lazy if which == "conj" else lazy.imag
    plain = lazy.resolve_conj().resolve_neg()
    path = saved(tmp_path, {"w": plain})
    with pytest.raises(LoadMismatchError, match="w: it is conjugated or negated: resolve"):
        load_into({"w": lazy}, path)
    path = saved(tmp_path, {"w": lazy})
    for strict in (True, False):
        with pytest.raises(
            LoadMismatchError, match=r"'w' .*conjugated or negated: use torch\.load"
        ):
            load_into({"w": plain}, path, strict=strict)
    assert "w: it is conjugated or negated" in fastserial.inspect(path).notes[0]
    assert fastserial.verify(path).ok
    with fastserial.open(path) as file:
        assert file.keys() == ["w"]
        with pytest.raises(UnreadableTensorError, match=r"use torch\.load"):
            file.get_tensor("w")


MISMATCHES: dict[str, tuple[Any, str]] = {  # what differs from a target that fits, and the words
    "shape": ({"b": torch.zeros(5)}, r"b: its shape is \(5,\)"),
    "dtype": ({"a": torch.zeros(3).double()}, "a: its dtype"),
    "unexpected": ({"extra": None}, "only in the checkpoint: 'extra'"),
    "missing": ({"c": torch.zeros(2)}, "not in the checkpoint: 'c'"),
    "meta": ({"a": torch.zeros(3, device="meta")}, "meta"),
    "sparse": ({"a": torch.zeros(3).to_sparse()}, "plain"),
    "expanded": ({"a": torch.zeros(1).expand(3)}, "a: several of its elements are one in memory"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatches_change_nothing(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": torch.ones(3), "b": torch.ones(4), "extra": torch.ones(1), "n": 5})
    changed, text = MISMATCHES[name]
    fits = {"a": torch.zeros(3), "b": torch.zeros(4), "extra": torch.zeros(1)}
    target = {key: value for key, value in {**fits, **changed}.items() if value is not None}
    with pytest.raises(LoadMismatchError, match=text) as caught:
        load_into(target, path)
    assert isinstance(caught.value, RuntimeError)
    assert not any(tensor.any() for tensor in fits.values())


def test_what_has_no_partner_is_returned(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": torch.ones(3), "b": torch.ones(4), "n": 5})
    target = {"a": torch.zeros(3), "c": torch.zeros(2)}
    left = load_into(target, path, strict=False)
    assert (left.missing_keys, left.unexpected_keys) == (["c"], ["b"])
    assert torch.equal(target["a"], torch.ones(3))
    with pytest.raises(LoadMismatchError, match="dtype"):
        load_into({"a": torch.zeros(3).int()}, path, strict=False)
    with pytest.raises(TypeError):
        load_into([torch.zeros(3)], path)  # type: ignore[arg-type]


def test_damage_is_found(tmp_path: Path) -> None:
    path = saved(
        tmp_path, {"a": noise(50_000), "b": noise(300), "t": noise(6000).view(60, 100).t()}
    )
    data = path.read_bytes()
    for at in (2000, 50_000, 52_000, 57_000):
        path.write_bytes(data)
        flip(path, at)
        target = {
            "a": torch.zeros(50_000, dtype=torch.uint8),
            "b": torch.zeros(300).byte(),
            "t": torch.zeros(100, 60).byte(),
        }
        with pytest.raises(CorruptCheckpointError, match=r"f\.pt"):
            load_into(target, path, verify=True)
        assert not any(tensor.any() for tensor in target.values())
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(CorruptCheckpointError, match=r"f\.pt"):
        load_into({}, path)


def test_autograd_notices(tmp_path: Path) -> None:
    """Memory that a backward pass still needs must not change unnoticed."""
    path = saved(tmp_path, {"w": torch.ones(3)})
    weight = nn.Parameter(torch.zeros(3))
    loss = (weight * weight).sum()
    load_into({"w": weight}, path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert weight.requires_grad
    with torch.inference_mode():
        target = {"w": torch.zeros(3)}
        load_into(target, path)
        assert torch.equal(target["w"], torch.ones(3))


@pytest.mark.parametrize("direct", [True, False])
def test_memory(direct: bool, tmp_path: Path) -> None:
    """No second copy of what is filled: the peak of resident memory tells."""
    path = saved(tmp_path, {"x": noise(160 * MIB), "y": noise(20 * MIB)})
    target = {"x": torch.ones(160 * MIB).byte(), "y": torch.ones(20 * MIB).byte()}
    gc.collect()
    with fastserial.options(direct=direct):
        assert peak(lambda: load_into(target, path)) < 96 * MIB
    os.unlink(path)
