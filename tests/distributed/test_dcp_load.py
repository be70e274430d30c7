"""`distributed.load` of folders of torch.distributed.checkpoint, in one process."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.nests import blank, differing
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

import fastserial
from fastserial import CorruptCheckpointError, LoadMismatchError, distributed
from fastserial.distributed import FastSavePlanner, FastStorageReader, FastStorageWriter

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),  # that this is one process
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


def save(state: dict[str, Any], path: Path, *, flatten: bool = True) -> None:
    """By stock."""
    planner = DefaultSavePlanner(flatten_state_dict=flatten)
    dcp.save(state, storage_writer=FileSystemWriter(path), planner=planner)


@pytest.mark.parametrize("wanted", [(torch.zeros(4, dtype=torch.int64), 0), None])
def test_a_tensor_in_a_value(wanted: Any, tmp_path: Path) -> None:
    whole = torch.arange(12).view(3, 4)
    state = {"rng": (whole[1], 3), "w": torch.ones(2)}
    save(state, tmp_path)
    found = {"rng": wanted, "w": torch.zeros(2)}
    report = distributed.load(tmp_path, found)
    assert not differing(found, state)
    assert not report.missing_keys
    assert not report.unexpected_keys


@pytest.mark.parametrize("whole", [True, False])
def test_a_state_that_was_not_flattened(whole: bool, tmp_path: Path) -> None:
    """The file has one item, or a module's state is one."""
    odd = {
        "turned": torch.ones(7, 5).t(),
        "one": torch.ones(1).expand(3, 4),
        "list": [torch.ones(3), 4],
    }
    state, model, other = {"odd": odd, "step": 5}, nn.Linear(3, 2), nn.Linear(3, 2)
    save({**state, "model": model.state_dict()}, tmp_path, flatten=False)
    into: dict[str, Any] = {"odd": None if whole else blank(odd), "step": 0}
    into["model"] = other
    distributed.load(tmp_path, into)
    assert not differing(dict(into.pop("model").state_dict()), dict(model.state_dict()))
    assert not differing(into, state)


def test_values_keep_their_types(tmp_path: Path) -> None:
    """And keys that are no text stay as they are."""
    saved = {"v": (OrderedDict(b=1, a=torch.ones(2)),), "w": {1.5: 5}, "mixed": {1: 5, 2: [6]}}
    save(saved, tmp_path)
    found: dict[str, Any] = {"v": None, "w": {1.5: 0}, "mixed": {1: 0}}
    distributed.load(tmp_path, found)
    assert not differing(found, saved)
    (value,) = found["v"]
    assert type(value) is OrderedDict
    assert list(value) == ["b", "a"]


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("where", ["storage_meta", "planner_data", "more"])
def test_metadata_is_not_unpickled(where: str, tmp_path: Path) -> None:
    folder, trap = tmp_path / "folder", tmp_path / "trap"
    save({"w": torch.ones(3)}, folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    if where == "planner_data":
        metadata.planner_data["z"] = ("z", Hostile(trap))
    else:
        setattr(metadata, where, Hostile(trap))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    found = {"w": torch.zeros(3)}
    distributed.load(folder, found)
    assert torch.equal(found["w"], torch.ones(3))
    assert not trap.exists()
    pickle.loads((folder / ".metadata").read_bytes())
    assert trap.exists(), "the trap works"


@pytest.mark.parametrize("kind", ["tensor", "value"])
@pytest.mark.parametrize("writer", [FastStorageWriter, FileSystemWriter])
def test_damage_is_found(kind: str, writer: Any, tmp_path: Path) -> None:
    pattern = torch.arange(100.0) + 0.5
    state = {"a": pattern} if kind == "tensor" else {"a": (pattern, 1)}
    dcp.save(state, storage_writer=writer(tmp_path))
    into: dict[str, Any] = {"a": torch.zeros(100) if kind == "tensor" else (torch.zeros(100), 1)}
    with fastserial.options(verify_on_load=True):
        distributed.load(tmp_path, into)
        assert not differing(into, state)
        (file,) = tmp_path.glob("*.distcp")
        data = bytearray(file.read_bytes())
        data[data.index(pattern.numpy().tobytes()) + 9] ^= 1
        file.write_bytes(data)
        with pytest.raises(CorruptCheckpointError, match="CRC-32"):
            distributed.load(tmp_path, into)


def test_numbers_as_keys(tmp_path: Path) -> None:
    """In a folder they are text."""
    model = nn.Linear(3, 2)
    optimizers = [torch.optim.Adam(model.parameters(), lr=lr) for lr in (0.1, 0.2)]
    for one in optimizers:
        model(torch.ones(1, 3)).sum().backward()
        one.step()
    states = [one.state_dict() for one in optimizers]
    save(
        {"model": model.state_dict(), "list": states, "other": {3: torch.ones(2), "4": 1}}, tmp_path
    )
    new = nn.Linear(3, 2)
    live = [torch.optim.Adam(new.parameters()) for _ in optimizers]
    plain = {3: torch.zeros(2), "4": 0}
    distributed.load(tmp_path, {"model": new, "list": live, "other": plain})
    assert not differing([one.state_dict() for one in live], states)
    assert not differing(plain, {3: torch.ones(2), "4": 1})
    for key in (int, str):  # as dcp.load takes either
        nest = {
            "state": {
                key(number): {name: one.clone().zero_() for name, one in entry.items()}
                for number, entry in states[0]["state"].items()
            },
            "param_groups": states[0]["param_groups"],
        }
        distributed.load(tmp_path, {"list": [nest, None]}, strict=False)
        for number, entry in states[0]["state"].items():
            assert not differing(nest["state"][key(number)], entry)


class Unknown:
    """A class that nobody allowed `weights_only` to load."""

    def __eq__(self, other: object) -> bool:
        return type(other) is Unknown

    __hash__ = object.__hash__


def sparse() -> Any:
    return (torch.ones(3).to_sparse(),)


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.quint8)


@pytest.mark.parametrize(
    ("odd", "into", "text"),
    [
        (quantized, None, "odd: in the folder it is quantized"),
        (quantized, quantized, "odd: in the folder it is quantized"),
        (Unknown, 0, "odd: .*weights_only"),
        (Unknown, {"a": 1}, "odd: .*weights_only"),
        (sparse, None, r"odd\.0: in the file its layout is"),
    ],
)
def test_what_nobody_wants_may_be_odd(odd: Any, into: Any, text: str, tmp_path: Path) -> None:
    save({"odd": odd(), "w": torch.ones(3)}, tmp_path)
    found = {"w": torch.zeros(3)}
    distributed.load(tmp_path, found, strict=False)
    assert torch.equal(found["w"], torch.ones(3))
    found["w"].zero_()
    with pytest.raises(LoadMismatchError, match=text):
        distributed.load(tmp_path, {**found, "odd": into() if callable(into) else into})
    assert not found["w"].any()


def test_a_folder_without_metadata(tmp_path: Path) -> None:
    save({"a": torch.ones(2)}, tmp_path)
    (tmp_path / ".metadata").unlink()
    with pytest.raises(fastserial.DistributedError, match="was not completed"):
        distributed.load(tmp_path, {"a": torch.zeros(2)})


@pytest.mark.parametrize("shape", [(5,), ()])
def test_a_file_of_another_checkpoint(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Stock refuses it, too."""
    save({"w": torch.ones(10)}, tmp_path / "a")
    save({"w": torch.zeros(shape)}, tmp_path / "b")
    a, b = (
        pickle.loads((tmp_path / name / ".metadata").read_bytes()).storage_data for name in "ab"
    )
    metadata = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    metadata.storage_data = dict(zip(a, b.values(), strict=True))
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    (tmp_path / "b" / "__0_0.distcp").replace(tmp_path / "a" / "__0_0.distcp")
    found = {"w": torch.zeros(10)}
    with pytest.raises(CorruptCheckpointError, match="w: it is that of another checkpoint"):
        distributed.load(tmp_path / "a", found)
    reader = FastStorageReader(tmp_path / "a")
    for one in (reader, dcp.FileSystemReader(tmp_path / "a")):
        with pytest.raises(CheckpointException):
            dcp.load(found, storage_reader=one)
    assert not found["w"].any()


def test_the_caching_of_plans_given_by_position(tmp_path: Path) -> None:
    """Stock's would keep what the first save wrote."""
    state: dict[str, Any] = {"a": torch.ones(3), "k": 0}
    for number in range(3):
        state["a"].fill_(number)
        state["k"] = number
        planner = FastSavePlanner(True, True, None, False, True)
        dcp.save(state, storage_writer=FastStorageWriter(tmp_path), planner=planner)
        found = {"a": torch.zeros(3), "k": -1}
        distributed.load(tmp_path, found)
        assert not differing(found, state)


def test_a_local_header_that_is_damaged(tmp_path: Path) -> None:
    """torch takes the place of a record from it: other bytes than those that have the checksum."""
    save({"rng": (torch.arange(100), 3)}, tmp_path)
    (shard,) = tmp_path.glob("*.distcp")
    data = bytearray(shard.read_bytes())
    header = data.rindex(b"PK\x03\x04", 0, data.index(b"data/0"))
    data[header + 28] ^= 1  # the length of the extra field
    shard.write_bytes(data)
    with fastserial.options(verify_on_load=True), pytest.raises(CorruptCheckpointError):
        distributed.load(tmp_path, {"rng": (torch.zeros(100, dtype=torch.long), 0)})
