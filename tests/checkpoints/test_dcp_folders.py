"""Folders of torch.distributed.checkpoint in `verify`, `inspect` and `convert`."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from support.damage import flip
from support.nests import differing
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from typer.testing import CliRunner

from fastserial import convert, distributed, inspect, verify
from fastserial.checkpoints.verify import checkpoints_in
from fastserial.cli.main import app
from fastserial.distributed import FastStorageReader, FastStorageWriter
from fastserial.errors import ConvertError, CorruptCheckpointError, WriteError

WRITERS: dict[str, Any] = {"dcp": FastStorageWriter, "stock": dcp.FileSystemWriter}
# that this is one process, or of other ranks' checkpoints
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def a_state() -> dict[str, Any]:
    torch.manual_seed(1)
    return {
        "model": {
            "small": torch.randn(10, 3),
            "large": torch.randn(700, 500),
            "turned": torch.randn(600, 500).t(),
            "half": torch.randn(33).bfloat16(),
            "empty": torch.empty(0, 4),
            "scalar": torch.tensor(3.0),
        },
        "optimizer": {"groups": [{"lr": 0.1, "m": torch.arange(5)}, {"lr": 0.2}]},
        "step": 7,
        "text": "x" * 3000,
    }


def save(state: dict[str, Any], path: Path, who: str) -> None:
    dcp.save(state, storage_writer=WRITERS[who](path))


def load(state: dict[str, Any], reader: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=reader)
    return state


# -- verify ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", WRITERS)
def test_any_flipped_bit_is_found_and_named(who: str, tmp_path: Path) -> None:
    save(a_state(), tmp_path, who)
    file = tmp_path / "__0_0.distcp"
    chance = random.Random(who)
    items = FastStorageReader(tmp_path).read_metadata().storage_data
    inside = {index.fqn: place for index, place in items.items() if place.length}
    for key, place in inside.items():
        for _ in range(5):
            at = place.offset + chance.randrange(place.length)
            flip(file, at)
            report = verify(tmp_path)
            assert report.status == "damaged", (key, at - place.offset)
            assert {problem.record for problem in report.problems} == {key}
            assert {problem.file for problem in report.problems} == {"__0_0.distcp"}
            flip(file, at)
    assert verify(tmp_path).status == "ok"


def test_metadata_that_is_damaged_missing_or_of_another_checkpoint(tmp_path: Path) -> None:
    for who in WRITERS:
        save(a_state(), tmp_path / who, who)
    flip(tmp_path / "dcp" / ".metadata", 200)
    report = verify(tmp_path / "dcp")
    assert [problem.file for problem in report.problems] == [".metadata"]
    with pytest.raises(CorruptCheckpointError, match="CRC-32"):
        inspect(tmp_path / "dcp")
    flip(tmp_path / "dcp" / ".metadata", 200)
    (tmp_path / "dcp" / "__0_0.distcp").rename(tmp_path / "dcp" / "__0_9.distcp")
    report = verify(tmp_path / "dcp")
    assert [(p.kind, p.file) for p in report.problems] == [("missing", "__0_0.distcp")]
    assert "__0_9.distcp" in report.notes[-1]
    other = a_state()
    other["model"]["large"] += 1
    save(other, tmp_path / "other", "dcp")
    (tmp_path / "other" / "__0_0.distcp").rename(tmp_path / "dcp" / "__0_0.distcp")
    report = verify(tmp_path / "dcp")
    assert [problem.record for problem in report.problems] == ["model.large"]
    assert "another checkpoint" in report.problems[0].message
    (tmp_path / "stock" / ".metadata").unlink()
    assert [problem.kind for problem in verify(tmp_path / "stock").problems] == ["missing"]


def test_short_files(tmp_path: Path) -> None:
    save(a_state(), tmp_path, "dcp")
    file = tmp_path / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 5)
    assert {problem.kind for problem in verify(tmp_path).problems} == {"truncated"}
    os.truncate(file, 0)
    assert len(verify(tmp_path).problems) == 11


def test_a_file_outside_of_the_folder_is_not_opened(tmp_path: Path) -> None:
    save({"a": torch.ones(3)}, tmp_path / "c", "stock")
    (tmp_path / "c" / "__0_0.distcp").rename(tmp_path / "__0_0.distcp")
    path = tmp_path / "c" / ".metadata"
    data = path.read_bytes()
    path.write_bytes(data.replace(b"\x0c__0_0.distcp", b"\x0f../__0_0.distcp"))
    report = verify(tmp_path / "c")
    assert report.status == "damaged"
    assert "cannot be in the folder" in report.problems[0].message
    with pytest.raises(CorruptCheckpointError):
        convert(tmp_path / "c", tmp_path / "c.pt")


# -- inspect ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", WRITERS)
def test_what_is_in_a_folder(who: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    save(a_state(), folder, who)
    report = verify(folder)
    assert (report.status, report.format, report.records) == ("ok", "dcp", 11), report
    assert report.unchecked == 0
    assert report.checked_bytes > 1_800_000
    assert report.bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert list(checkpoints_in(tmp_path)) == [str(folder)]
    found = inspect(folder)
    assert found.format == "dcp"
    shapes = {tensor.key: (tensor.dtype, tensor.shape) for tensor in found.tensors}
    assert shapes["model.turned"] == ("float32", (500, 600))
    assert shapes["model.half"] == ("bfloat16", (33,))
    assert len(shapes) == 7
    assert found.values == 4
    assert len(found.records) == 11
    assert not found.notes
    result = CliRunner().invoke(app, ["inspect", "--records", str(folder)])
    assert result.exit_code == 0
    assert "optimizer.groups.0.m" in result.output
    assert "__0_0.distcp: step" in result.output
    assert CliRunner().invoke(app, ["inspect", "--json", str(folder)]).exit_code == 0


# -- convert ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", WRITERS)
def test_to_one_file_and_back(who: str, tmp_path: Path) -> None:
    state = a_state()
    save(state, tmp_path / "folder", who)
    done = convert(tmp_path / "folder", tmp_path / "zip.pt")
    assert done.nbytes == (tmp_path / "zip.pt").stat().st_size
    found = torch.load(tmp_path / "zip.pt", weights_only=True)
    assert not differing(found, state)
    assert verify(tmp_path / "zip.pt").status == "ok"
    target = tmp_path / "new dcp"
    convert(tmp_path / "zip.pt", target, "dcp")
    assert verify(target).status == "ok"
    found = load(a_state() | {"step": None}, FastStorageReader(target))
    assert not differing(found, state)
    convert(target, tmp_path / "again.pt")
    assert not differing(torch.load(tmp_path / "again.pt"), state)
    assert not differing(load(a_state(), dcp.FileSystemReader(target)), state)
    convert(tmp_path / "folder", tmp_path / "folder 2", "dcp")
    assert not differing(load(a_state(), FastStorageReader(tmp_path / "folder 2")), state)


@pytest.mark.parametrize("who", WRITERS)
def test_to_several_files_with_an_index(who: str, tmp_path: Path) -> None:
    state = a_state()["model"]
    save({"model": state}, tmp_path / "folder", who)
    done = convert(tmp_path / "folder", tmp_path / "many", key="model", shard_nbytes=1_300_000)
    assert done.nbytes == sum(path.stat().st_size for path in (tmp_path / "many").iterdir())
    assert len(list((tmp_path / "many").glob("*.safetensors"))) == 2
    convert(tmp_path / "folder", tmp_path / "whole", key="model", shard_nbytes=1 << 30)
    assert [path.name for path in (tmp_path / "whole").iterdir()] == ["model.safetensors"]
    many = tmp_path / "many"
    for source in (many, many / "model.safetensors.index.json", tmp_path / "whole"):
        convert(source, tmp_path / "back.pt")
        assert not differing(torch.load(tmp_path / "back.pt"), state)


def test_every_new_folder_gets_a_durable_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync = set(), os.fsync

    def noting(fd: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    torch.save({"a": torch.ones(3)}, tmp_path / "file.pt")
    monkeypatch.setattr(os, "fsync", noting)
    convert(tmp_path / "file.pt", tmp_path / "x" / "y" / "z", shard_nbytes=100)
    names = [tmp_path, *(tmp_path / name for name in ("x", "x/y", "x/y/z"))]
    assert synced >= set(map(str, names))


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    save(a_state(), tmp_path / "folder", "dcp")
    with pytest.raises(ConvertError, match="--key"):
        convert(tmp_path / "folder", tmp_path / "x.safetensors")
    with pytest.raises(ConvertError, match="not empty"):
        convert(tmp_path / "folder", tmp_path, key="model", shard_nbytes=10)
    with pytest.raises(ConvertError, match="the same"):
        convert(tmp_path / "folder", tmp_path / "folder", "dcp")
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(ConvertError, match="dictionary"):
        convert(tmp_path / "list.pt", tmp_path / "y", "dcp")
    file = tmp_path / "folder" / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)
    with pytest.raises(CorruptCheckpointError):
        convert(tmp_path / "folder", tmp_path / "x.pt")
    (tmp_path / "taken").write_text("")
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    with pytest.raises((WriteError, OSError)):
        convert(tmp_path / "a.safetensors", tmp_path / "taken", "dcp")
    assert (tmp_path / "taken").read_text() == ""


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """By a file with views, tensors in another order, and one storage twice."""
    base = torch.arange(300_000.0)
    state = {"a": base[7:20], "b": base.view(300, 1000).t(), "c": base[::2], "d": base[:0]}
    torch.save(state, tmp_path / "file.pt")
    zeros = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    save(zeros, tmp_path / "folder", "dcp")
    convert(tmp_path / "file.pt", tmp_path / "folder", "dcp")
    assert sorted(os.listdir(tmp_path / "folder")) == [".metadata", "__0_1.distcp"]
    assert verify(tmp_path / "folder").ok
    assert not differing(load(zeros, dcp.FileSystemReader(tmp_path / "folder")), state)


@pytest.mark.parametrize(("part", "byte"), [(b"\x80\x02", 0), (b"PK\1\2", 10)])
def test_damage_of_a_value_is_damage(part: bytes, byte: int, tmp_path: Path) -> None:
    """In its pickle, or in the directory, where torch's reader does not name it so."""
    save({"w": torch.ones(3), "text": "x" * 3000}, tmp_path / "folder", "stock")
    file = tmp_path / "folder" / "__0_0.distcp"
    (value,) = (item for item in inspect(tmp_path / "folder").records if item[0].endswith("text"))
    flip(file, file.read_bytes().index(part, value[1]) + byte)
    with pytest.raises(CorruptCheckpointError, match="text"):
        convert(tmp_path / "folder", tmp_path / "x.pt", verify=False)
    with pytest.raises(CorruptCheckpointError, match="text"):
        distributed.load(tmp_path / "folder", {"w": torch.zeros(3), "text": ""})


# -- ranks with checkpoints of their own -----------------------------------------------------------


def save_alone(rank: int, state: dict[str, Any], path: Path) -> None:
    """Save as a rank does with `use_collectives=False`."""
    writer, planner = dcp.FileSystemWriter(path), DefaultSavePlanner()
    writer.set_up_storage_writer(True, rank=rank, use_collectives=False)
    planner.set_up_planner(state, writer.storage_meta(), True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


def test_ranks_with_checkpoints_of_their_own(tmp_path: Path) -> None:
    for rank in range(2):
        state = {"w": torch.ones(5 + rank), f"of {rank}": torch.ones(3), "step": 3}
        save_alone(rank, state, tmp_path / "folder")
    report = verify(tmp_path / "folder")
    assert report.ok, report
    found = inspect(tmp_path / "folder")
    assert [(one.key, one.shape, one.kind) for one in found.tensors] == [
        ("w", (5,), "tensor, in __0.metadata"),
        ("of 0", (3,), "tensor, in __0.metadata"),
        ("w", (6,), "tensor, in __1.metadata"),
        ("of 1", (3,), "tensor, in __1.metadata"),
    ]
    assert found.values == 2
    assert len(found.records) == 6
    assert "2 ranks, each with a checkpoint of its own" in found.notes
    output = CliRunner().invoke(app, ["inspect", str(tmp_path / "folder")])
    assert output.exit_code == 0
    with pytest.raises(ConvertError, match=r"folder: each rank saved .* of its own"):
        convert(tmp_path / "folder", tmp_path / "file.pt")
    assert not (tmp_path / "file.pt").exists()


# -- what a folder does not tell by itself ---------------------------------------------------------


def test_what_a_folder_does_not_keep(tmp_path: Path) -> None:
    """Integer keys and shared memory, as in stock's tools; a warning names the keys."""
    weight = torch.randn(4, 4)
    state = {"optimizer": {"state": {key: {"step": weight[0]} for key in range(3)}}}
    save({**state, "model": {"a": weight, "b": weight}}, tmp_path / "folder", "dcp")
    assert verify(tmp_path / "folder").ok
    with pytest.warns(UserWarning, match=r"'optimizer\.state\.0\.\w+' and \d+ more are text"):
        convert(tmp_path / "folder", tmp_path / "y.pt")
    dcp_to_torch_save(str(tmp_path / "folder"), str(tmp_path / "stock.pt"))
    for name in ("y", "stock"):
        found = torch.load(tmp_path / f"{name}.pt", weights_only=False)
        assert list(found["optimizer"]["state"]) == ["0", "1", "2"]
        assert torch.equal(found["model"]["a"], weight)
        assert torch.equal(found["model"]["b"], weight)
