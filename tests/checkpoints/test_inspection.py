"""`inspect` tells what is in a checkpoint without loading or executing it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastserial.checkpoints.inspect import Inspection, inspect
from fastserial.errors import CorruptCheckpointError, UnreadableCheckpointError
from fastserial.formats.pickles import Call, Decoded, Global, Limits, Mapping, Persistent
from fastserial.formats.tensors import Outline, outline

FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def saved(value: Any, path: Path, zipped: bool = True) -> Inspection:
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    return inspect(path)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@FORMATS
def test_each_tensor_is_found_where_its_bytes_are(tmp_path: Path, zipped: bool) -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 5)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "list": [torch.arange(5), (torch.ones(2, dtype=torch.bfloat16),)],
        3: torch.eye(3, dtype=torch.complex64),
    }
    path = tmp_path / "x.pt"
    found = saved(state, path, zipped)
    expected = {
        **{f"model.{key}": value for key, value in state["model"].items()},
        **{
            f"optimizer.state.{index}.{key}": value
            for index, values in state["optimizer"]["state"].items()
            for key, value in values.items()
        },
        "list.0": state["list"][0],
        "list.1.0": state["list"][1][0],
        "3": state[3],
    }
    assert {tensor.key for tensor in found.tensors} == set(expected)
    raw = path.read_bytes()
    for tensor in found.tensors:
        value = expected[tensor.key]
        assert tensor.dtype == str(value.dtype).removeprefix("torch.")
        assert (tensor.shape, tensor.stride) == (tuple(value.shape), value.stride())
        assert tensor.is_contiguous == value.is_contiguous()
        at = found.offset_of(tensor)
        assert at is not None
        assert raw[at : at + tensor.nbytes] == bytes_of(value), tensor.key
    assert found.format == ("zip" if zipped else "legacy")
    assert found.bytes == len(raw)
    assert found.wasted_bytes == 0


@FORMATS
def test_views_shared_storages_and_waste(tmp_path: Path, zipped: bool) -> None:
    base = torch.zeros(1000, dtype=torch.float64)
    state = {"a": base[:10], "b": base[5:20], "tied": base[:10], "row": torch.zeros(3).expand(4, 3)}
    found = saved(state, tmp_path / "x.pt", zipped)
    big = next(storage for storage in found.storages if storage.nbytes == 8000)
    assert big.is_shared
    assert set(big.tensors) == {"a", "b", "tied"}
    assert big.needed_bytes == 280
    assert found.wasted_bytes == big.wasted_bytes == 7720


def test_the_plain_tensor(tmp_path: Path) -> None:
    found = saved(torch.ones(3), tmp_path / "x.pt")
    assert [tensor.key for tensor in found.tensors] == [""]
    assert found.to_dict()["tensors"][0]["offset"] == found.storages[0].offset


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("x.pt", b"", "the file is empty"),
        ("x.pt", b"hello", "neither"),
        ("x.pt", pickle.dumps([1]), "neither"),
        ("__0_0.distcp", b"PK\3\4 and so on", "torch.distributed.checkpoint"),
    ],
)
def test_no_checkpoint(tmp_path: Path, name: str, content: bytes, why: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UnreadableCheckpointError, match=f"{name}: .*{why}") as caught:
        inspect(path)
    assert not isinstance(caught.value, CorruptCheckpointError)
    assert isinstance(caught.value, RuntimeError)


def test_a_directory_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpointError, match="a directory"):
        inspect(tmp_path)
    with pytest.raises(UnreadableCheckpointError, match="regular"):
        inspect("/dev/null")
    with pytest.raises(FileNotFoundError):
        inspect(tmp_path / "missing")


def test_damaged_first_bytes_are_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(3)}, path)
    path.write_bytes(b"????" + path.read_bytes()[4:])
    with pytest.raises(CorruptCheckpointError, match="first bytes"):
        inspect(path)


def test_tensors_that_are_not_listed_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "f.pt"
    one = torch.ones(2, dtype=torch.complex64).conj()
    torch.save({str(number): one for number in range(150)}, path)
    notes = inspect(path).notes
    assert len(notes) == 101
    assert notes[-1] == "and 50 more tensors that are not listed"


def test_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    state = {"w": torch.arange(6.0).view(3, 2), "b.c": torch.zeros(2, dtype=torch.bfloat16)}
    path = tmp_path / "x.safetensors"
    safetensors.save_file(state, path)
    found = inspect(path)
    assert found.format == "safetensors"
    assert {tensor.key: tensor.shape for tensor in found.tensors} == {"w": (3, 2), "b.c": (2,)}
    for tensor in found.tensors:
        at = found.offset_of(tensor)
        assert at is not None
        assert path.read_bytes()[at : at + tensor.nbytes] == bytes_of(state[tensor.key])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError):
        inspect(path)


# -- hostile pickles -----------------------------------------------------------------------------


def of(value: Any, *persistents: Persistent, limits: Limits | None = None) -> Outline:
    return outline(Decoded(value, frozenset(), list(persistents), 0), limits)


def tensor_of(*arguments: Any) -> Call:
    return Call(Global("torch._utils", "_rebuild_tensor_v2"), arguments)


STORAGE = Persistent(("storage", Global("torch", "FloatStorage"), "0", "cpu", 10))


@pytest.mark.parametrize(
    "arguments",
    [
        (STORAGE, 0, (11,), (1,)),
        (STORAGE, 8, (3,), (1,)),
        (STORAGE, 0, (2, 6), (5, 1)),
        (STORAGE, -1, (2,), (1,)),
        (STORAGE, 2**70, (2,), (1,)),
        (STORAGE, 0, (-2,), (1,)),
        (STORAGE, 0, (2, 2), (1,)),
        (STORAGE, 0, "ab", "cd"),
        (STORAGE, 0, (2**64,), (1,)),
        (STORAGE, 0, ([],), ([],)),
        (None, 0, (2,), (1,)),
        (STORAGE,),
        (),
    ],
)
def test_impossible_tensors_are_reported(arguments: tuple[Any, ...]) -> None:
    found = of(Mapping([("w", tensor_of(*arguments))]), STORAGE)
    assert not found.tensors
    assert len(found.problems) == 1
    assert found.notes[0].startswith("tensor w: ")


@pytest.mark.parametrize(
    "pid",
    [
        (),
        ("storage",),
        ("storage", "FloatStorage", "0", "cpu", 1),
        ("storage", Global("torch", "NoStorage"), "0", "cpu", 1),
        ("storage", Global("torch", "FloatStorage"), 0, "cpu", 1),
        ("storage", Global("torch", "FloatStorage"), "0", None, 1),
        ("storage", Global("torch", "FloatStorage"), "0", "cpu", -1),
        ("storage", Global("torch", "FloatStorage"), "0", "cpu", 2**64),
        ("storage", Global("torch", "FloatStorage"), "0", "cpu", 1.5),
    ],
)
def test_impossible_storages_are_errors(pid: Any) -> None:
    with pytest.raises(CorruptCheckpointError):
        of(None, Persistent(pid))


def test_storages_that_disagree_are_an_error() -> None:
    other = Persistent(("storage", Global("torch", "FloatStorage"), "0", "cpu", 11))
    with pytest.raises(CorruptCheckpointError, match="40 and with 44"):
        of(None, STORAGE, other)


def test_values_that_multiply_are_cut_off() -> None:
    value: Any = [tensor_of(STORAGE, 0, (2,), (1,))]
    for _ in range(60):
        value = [value, value]
    found = of(value, STORAGE, limits=Limits(visits=10_000))
    assert not found.complete
