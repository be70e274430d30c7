"""Folders of torch_checkpointing in `convert`: what ranks saved, put together."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from support import ranks
from support.damage import flip
from support.sharded import noise, same_bytes
from torch.distributed.tensor import Partial

from fastserial import convert, verify
from fastserial.errors import ConvertError, CorruptCheckpointError

SEVERAL = [1, 2, 4]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Return the folders that so many ranks saved."""
    root = tmp_path_factory.mktemp("saved")
    for count in SEVERAL:
        ranks.run("rank_folders", count, root / str(count), "stream")
    return {count: root / str(count) for count in SEVERAL}


def copy(source: Path, target: Path, *items: str) -> Path:
    """Copy the files of some items."""
    target.mkdir()
    for path in source.iterdir():
        if path.name.rpartition("_")[0] in items:
            shutil.copy(path, target)
    return target


def said(folder: Path, count: int) -> Path:
    """Write what says how many ranks there were."""
    (folder / "metadata.pkl").write_bytes(pickle.dumps({"metadata": {}, "world_size": count}))
    return folder


def write(folder: Path, item: str, *values: Any) -> Path:
    """Save a value of each rank."""
    folder.mkdir(exist_ok=True)
    for rank, value in enumerate(values):
        with (folder / f"{item}_{rank}.pt").open("wb") as file:
            torch.save(value, file)
    return folder


def converted(folder: Path, key: str = "") -> Any:
    target = folder.parent / "converted.pt"
    convert(folder, target, key=key, ranks=True)
    return torch.load(target)


def refused(folder: Path, match: str, key: str = "") -> None:
    target = folder.parent / "refused.pt"
    with pytest.raises(ConvertError, match=match) as caught:
        convert(folder, target, key=key, ranks=True)
    assert str(folder) in str(caught.value)
    assert not target.exists()
    assert not list(folder.parent.glob("refused*"))


# -- shards ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", SEVERAL)
def test_every_placement(saved: dict[int, Path], count: int, tmp_path: Path) -> None:
    target = tmp_path / "placed.pt"
    assert convert(saved[count], target, key="placed", ranks=True).source == "torch_checkpointing"
    found = torch.load(target)
    assert len(found) == {1: 19, 2: 19, 4: 19 + 66 + 60 + 3}[count]
    for key, tensor in found.items():
        assert type(tensor) is torch.Tensor
        seed = int(key.split()[0])
        shape = [9, 4] if "on half" in key else list(tensor.shape)
        assert same_bytes(tensor, noise(shape, tensor.dtype, seed)), key
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.itemsize


@pytest.mark.parametrize("count", SEVERAL)
def test_an_fsdp_model_in_every_container(
    saved: dict[int, Path], count: int, tmp_path: Path
) -> None:
    """The same, however many ranks saved it."""
    convert(saved[1], tmp_path / "one.pt", key="model", ranks=True)
    expected = torch.load(tmp_path / "one.pt")
    assert list(expected) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    source = saved[count]
    convert(source, tmp_path / "zip.pt", key="model", verify=True, ranks=True)
    found = torch.load(tmp_path / "zip.pt")
    assert type(found) is type(expected)
    assert found._metadata == expected._metadata
    convert(source, tmp_path / "m.safetensors", key="model", ranks=True)
    convert(source, tmp_path / "shards", key="model", shard_nbytes=64, ranks=True)
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    convert(tmp_path / "shards", tmp_path / "again.pt")
    convert(source, tmp_path / "dcp", "dcp", key="model", ranks=True)
    folder = {key: torch.zeros_like(tensor) for key, tensor in expected.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        dcp.load(folder, checkpoint_id=str(tmp_path / "dcp"))
    for other in (found, load_file(tmp_path / "m.safetensors"), folder):
        assert other.keys() == expected.keys()
        assert all(same_bytes(other[key], tensor) for key, tensor in expected.items())
    again = torch.load(tmp_path / "again.pt")
    assert all(same_bytes(again[key], tensor) for key, tensor in expected.items())
    with pytest.raises(ConvertError, match=r"'model' alone: key='model'"):
        convert(copy(source, tmp_path / "c", "model"), tmp_path / "x.safetensors", ranks=True)


def test_items_are_the_first_level(saved: dict[int, Path], tmp_path: Path) -> None:
    found = converted(copy(saved[4], tmp_path / "c", "model", "optimizer", "plain"))
    assert list(found) == ["model", "optimizer", "plain"]
    assert found["optimizer"]["state"][0]["exp_avg"].shape == (5, 7)
    assert found["optimizer"]["param_groups"][0]["params"] == [0, 1, 2, 3]
    plain = found["plain"]
    assert plain["tied"].data_ptr() == plain["weight"].data_ptr()
    assert plain["steps"][0] == 3
    assert type(plain["steps"][2]) is tuple
    assert same_bytes(
        converted(tmp_path / "c", "optimizer.state.0.exp_avg"),
        found["optimizer"]["state"][0]["exp_avg"],
    )


def test_a_rank_that_is_missing(saved: dict[int, Path], tmp_path: Path) -> None:
    folder = said(copy(saved[4], tmp_path / "c", "placed", "plain"), 4)
    assert verify(folder / "metadata.pkl").notes == ()
    (folder / "placed_3.pt").unlink()
    assert verify(folder / "metadata.pkl").notes == ("placed: there is no file of rank 3",)
    refused(folder, r"entry 'placed\..*shards are missing, those of rank 3: convert the file")
    assert converted(folder, "plain")["steps"][0] == 3
    replicated = converted(folder, "placed.0 on a line 0")
    assert same_bytes(replicated, noise([8, 12], torch.float32, 0))


def test_replicas_that_differ(saved: dict[int, Path], tmp_path: Path) -> None:
    """A bit of one of them, under a checksum that fits: no other file tells that it is wrong."""
    folder = said(copy(saved[2], tmp_path / "c", "placed"), 2)
    value = torch.load(folder / "placed_1.pt", weights_only=False)
    value["5 on a line 0"]._local_tensor.view(torch.uint8)[77, 3] ^= 1
    with (folder / "placed_1.pt").open("wb") as file:
        torch.save(value, file)
    refused(folder, r"'placed\.5 on a line 0': ranks 0 and 1 have different values")
    assert verify(folder / "placed_1.pt").ok


KEY = "0 on a line 1"  # by rows


def edited(saved: Path, folder: Path, edit: Callable[[dict[str, Any], int], None]) -> Path:
    """Copy an item; each rank's part of it is changed."""
    copy(saved, folder, "placed")
    for path in folder.iterdir():
        rank = int(path.stem.rpartition("_")[2])
        whole = torch.load(path, weights_only=False)
        names = (KEY, "0 on a line 0", "0 on a line 2")
        value = {name: whole[name] for name in names}
        edit(value, rank)
        with path.open("wb") as file:
            torch.save(value, file)
    return folder


def another(tensor: Any, local: torch.Tensor, device: str = "cpu") -> Any:
    """Return a DTensor that is placed like one, with a shard of its own."""
    make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
    made = make(type(tensor), tensor.shape, dtype=tensor.dtype, device=device)
    made._spec, made._local_tensor = tensor._spec, local
    return made


def without_spec(value: dict[str, Any], rank: int) -> None:
    del value[KEY]._spec


def on_one_rank(value: dict[str, Any], rank: int) -> None:
    value[KEY] = value[KEY]._local_tensor if rank else value[KEY]


def too_small(value: dict[str, Any], rank: int) -> None:
    value[KEY]._local_tensor = value[KEY]._local_tensor[:3].clone()


def a_sum(value: dict[str, Any], rank: int) -> None:
    value[KEY]._spec.placements = (Partial(),)


MADE_UP = {
    without_spec: r"no DTensor that torch makes \(AttributeError",
    on_one_rank: "it is a DTensor, but not on rank 1",
    too_small: r"shard of rank 0 has the shape \(3, 12\)",
    a_sum: "a sum that no rank has; redistribute it first",
}


@pytest.mark.parametrize("edit", MADE_UP, ids=lambda edit: edit.__name__)
def test_shards_that_make_no_tensor(
    edit: Callable[[dict[str, Any], int], None], saved: dict[int, Path], tmp_path: Path
) -> None:
    folder = edited(saved[2], tmp_path / "c", edit)
    refused(folder, rf"entry 'placed\.{KEY}': .*{MADE_UP[edit]}")
    assert len(converted(folder, "placed.0 on a line 2")) == 8


def test_tied_shards_stay_tied(saved: dict[int, Path], tmp_path: Path) -> None:
    def tie(value: dict[str, Any], rank: int) -> None:
        local = value[KEY]._local_tensor
        value["tied"] = another(value[KEY], local.detach())
        value["half tied"] = another(value[KEY], local.detach() if rank else local.clone())

    found = converted(edited(saved[2], tmp_path / "c", tie))["placed"]
    assert found["tied"].data_ptr() == found[KEY].data_ptr()
    assert found["half tied"].data_ptr() != found[KEY].data_ptr()
    for key in (KEY, "tied", "half tied"):
        assert same_bytes(found[key], noise([8, 12], torch.float32, 0))


def test_a_flipped_bit(saved: dict[int, Path], tmp_path: Path) -> None:
    folder = said(copy(saved[2], tmp_path / "c", "placed", "plain"), 2)
    data = (folder / "placed_1.pt").read_bytes()
    flip(folder / "placed_1.pt", len(data) // 2)
    assert verify(folder / "placed_1.pt").status == "damaged"
    for manifest in (True, False):
        with pytest.raises(CorruptCheckpointError, match=re.escape(str(folder / "placed_1.pt"))):
            convert(folder, tmp_path / "refused.pt", verify=True, ranks=not manifest)
        (folder / "metadata.pkl").unlink(missing_ok=True)
    assert sorted(os.listdir(tmp_path)) == ["c"]


# -- everything else -------------------------------------------------------------------------------


def test_what_ranks_have_for_themselves(saved: dict[int, Path], tmp_path: Path) -> None:
    refused(saved[2], r"'own\.data': ranks 0 and 1 have different values, and nothing says")
    refused(saved[2], r"'own\.rank': ranks 0 and 1 have different values \(0 and 1\)", "own.rank")
    assert same_bytes(converted(saved[1], "own.data"), noise([16], torch.uint8, 0))
    convert(saved[2] / "own_1.pt", tmp_path / "alone.pt")
    assert torch.load(tmp_path / "alone.pt")["rank"] == 1
    convert(saved[2] / "model_1.pt", tmp_path / "shards.pt")  # stays what it is
    assert type(torch.load(tmp_path / "shards.pt")["0.weight"]).__name__ == "DTensor"


def test_keys_are_united(tmp_path: Path) -> None:
    """As the stages of a pipeline have them."""
    a, b = {"0": torch.ones(3), "all": {"x": 1}}, {"1": torch.zeros(4), "all": {"x": 1, "y": 2}}
    found = converted(write(tmp_path / "c", "model", a, b))["model"]
    assert list(found) == ["0", "all", "1"]
    assert found["all"] == {"x": 1, "y": 2}
    assert converted(tmp_path / "c", "model.1").tolist() == [0, 0, 0, 0]
    with pytest.raises(ConvertError, match="no '2' in 'model'"):
        convert(tmp_path / "c", tmp_path / "x.pt", key="model.2", ranks=True)


ODD = {
    "kind": (
        {"a": 1},
        {"a": torch.ones(1)},
        r"'m\.a': ranks 0 and 1 have different values: 1 and Tensor",
    ),
    "bool": ({"a": 1}, {"a": True}, r"'m\.a': ranks 0 and 1 have different values: 1 and True"),
    "dtype": (
        {"a": torch.ones(2)},
        {"a": torch.ones(2).double()},
        r"'m\.a': ranks 0 and 1 have different tensors: torch\.float32 .* torch\.float64",
    ),
    "shape": ([torch.ones(2)], [torch.ones(3)], r"'m\.0': .* \(2,\) and .* \(3,\)"),
    "length": ({"a": [1, 2]}, {"a": [1]}, r"'m\.a': ranks 0 and 1 have 2 and 1 values in it"),
    "list": ({"a": [1]}, {"a": (1,)}, r"'m\.a': .* list and tuple"),
    "one bit": (
        {"a": torch.zeros(3_000_000, dtype=torch.uint8)},
        {"a": torch.zeros(3_000_000, dtype=torch.uint8).index_fill_(0, torch.tensor(2_900_000), 1)},
        r"'m\.a': ranks 0 and 1 have different values, and nothing says",
    ),
    "sparse": (
        {"a": torch.eye(3).to_sparse()},
        {"a": torch.eye(3).to_sparse()},
        r"'m\.a': it is no plain tensor",
    ),
    "number": (1, 2, r"'m': ranks 0 and 1 have different values \(1 and 2\)"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_does_not_go_together(name: str, tmp_path: Path) -> None:
    one, other, match = ODD[name]
    refused(write(tmp_path / "c", "m", one, other), match)


def test_one_value_of_a_rank(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", "layer_1", torch.ones(3), torch.ones(3))
    write(folder, "step", 3)  # the first rank alone
    found = converted(folder)
    assert list(found) == ["layer_1", "step"]
    assert found["layer_1"].tolist() == [1, 1, 1]
    assert found["step"] == 3
    refused_key = r"there is no 'layer' in it; there are: 'layer_1', 'step'"
    with pytest.raises(ConvertError, match=refused_key):
        convert(folder, tmp_path / "x.pt", key="layer.0", ranks=True)


def test_a_pickle_that_needs_more_than_weights_only(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", "m", {"a": torch.ones(2)}, {"a": torch.ones(2)})
    write(folder, "path", Path("x"), Path("x"))
    refused(folder, r"path_0\.pt: .*weights_only|path_0\.pt: .*Unsupported")
    assert converted(folder, "m")["a"].tolist() == [1, 1]


def test_a_target_among_the_sources(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", "m", {"a": torch.ones(2)})
    before = (folder / "m_0.pt").read_bytes()
    for target in (folder / "m_0.pt", folder / "m.pt"):
        with pytest.raises(ConvertError, match="the target is among the files of the source"):
            convert(folder, target, ranks=True)
    with pytest.raises(ConvertError, match="are the same"):
        convert(folder, folder, "dcp", ranks=True)
    assert (folder / "m_0.pt").read_bytes() == before
    assert os.listdir(folder) == ["m_0.pt"]


def test_files_that_are_left_out_are_named(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "saved", "model", {"weight": torch.ones(5)}, {"weight": torch.ones(5)}
    )
    for index in range(7):
        (folder / f"config_{index}.json").write_text("{}")
    with pytest.warns(UserWarning, match="saved: not converted.*config_0.json,.* and 2 more"):
        assert list(converted(folder)) == ["model"]
    assert list(converted(folder, "model")) == ["weight"]  # the only one that was asked for
