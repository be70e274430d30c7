"""Folders of torch_checkpointing in `verify` and `inspect`; which folders are none."""

from __future__ import annotations

import json
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.damage import flip
from typer.testing import CliRunner

import fastserial
from fastserial import convert, inspect, verify
from fastserial.checkpoints.rank_folder import find_rank_folder
from fastserial.checkpoints.verify import checkpoints_in
from fastserial.cli.main import app
from fastserial.errors import ConvertError, CorruptCheckpointError, UnreadableCheckpointError


def put(path: Path, value: Any = 3) -> Path:
    """Save to a stream, as torch_checkpointing does."""
    with path.open("wb") as file:
        torch.save(value, file)
    return path


def folder_of(path: Path, *names: str) -> Path:
    path.mkdir(parents=True)
    for name in names:
        put(path / name, {"w": torch.arange(3000), "step": 3})
    return path


def said(folder: Path, count: int) -> Path:
    """Write what says how many ranks there were; return its path."""
    path = folder / "metadata.pkl"
    path.write_bytes(pickle.dumps({"metadata": {}, "world_size": count, "version": "2.0"}))
    return path


def run(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


# -- which folders ---------------------------------------------------------------------------------

ITS = {
    "one rank": (["model_0.pt"], {"model": {0}}),
    "several": (["a_0.pt", "a_1.pt", "b_0.pt", "b_1.pt"], {"a": {0, 1}, "b": {0, 1}}),
    "names": (["layer_1_0.pt", "0_0.pt", "-__0.pt"], {"layer_1": {0}, "0": {0}, "-_": {0}}),
    "on some ranks": (["a_0.pt", "a_1.pt", "a_2.pt", "b_1.pt"], {"a": {0, 1, 2}, "b": {1}}),
    "ten": ([f"a_{rank}.pt" for rank in range(11)], {"a": set(range(11))}),
}
NOT_ITS = {
    "steps": ["ckpt_100.pt", "ckpt_200.pt"],
    "a date": ["a_0.pt", "a_20260101.pt"],
    "leading zeros": ["a_00.pt", "a_01.pt"],
    "digits of another script": ["a_\u0661.pt"],
    "another file": ["a_0.pt", "best.pt"],
    "Lightning": ["a_0.pt", "last.ckpt"],
    "no item": ["_0.pt"],
    "a dot": ["v1.5_0.pt"],
    "nothing": [],
}


@pytest.mark.parametrize("name", ITS)
def test_its_folders(name: str, tmp_path: Path) -> None:
    names, expected = ITS[name]
    folder = folder_of(tmp_path / "c", *names)
    (folder / "config_0.json").write_text("{}")
    (folder / "below").mkdir()
    assert find_rank_folder(folder) is None
    found = find_rank_folder(folder, by_name=True)
    assert found is not None
    assert {item: set(files) for item, files in found.items.items()} == expected
    assert sorted(found.files) == sorted(names)
    assert found.others == ["config_0.json"]
    assert [*checkpoints_in(tmp_path)] == [str(folder / one) for one in sorted(names)]
    told = said(folder, 1 + max(max(ranks) for ranks in expected.values()))
    assert find_rank_folder(folder) == found._replace(metadata=told.name)
    assert [*checkpoints_in(tmp_path)] == [str(folder)]
    report = verify(folder)
    assert (report.status, report.format) == ("ok", "torch_checkpointing")
    assert report.bytes == sum(os.stat(folder / name).st_size for name in names)
    assert report.checked_bytes >= 24000 * len(names)


@pytest.mark.parametrize("name", NOT_ITS)
def test_other_folders(name: str, tmp_path: Path) -> None:
    """Their files are gone through, as ever, also if there is a file called like its own."""
    folder = folder_of(tmp_path / "c", *NOT_ITS[name])
    for _ in range(2):
        assert find_rank_folder(folder) is None
        assert find_rank_folder(folder, by_name=True) is None
        assert [*checkpoints_in(tmp_path)] == [str(folder / one) for one in sorted(NOT_ITS[name])]
        assert verify(folder).status == "unreadable"
        for tool in (inspect, lambda path: convert(path, tmp_path / "x.pt", ranks=True)):
            with pytest.raises(UnreadableCheckpointError, match="c: a directory, and none that"):
                tool(folder)
        said(folder, 2)


def test_files_of_epochs_are_not_put_together(tmp_path: Path) -> None:
    """Nothing says that they are of ranks: they would be one checkpoint that nobody saved."""
    folder = tmp_path / "c"
    folder.mkdir()
    for epoch in range(3):
        value = {"frozen": torch.ones(3), f"head {epoch}": epoch}
        torch.save(value, folder / f"epoch_{epoch}.pt")
    with pytest.raises(ConvertError, match=r"epoch_0\.pt, epoch_1\.pt, .*ranks=True"):
        convert(folder, tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()
    done = run("verify", folder)
    assert (done.exit_code, "3 checkpoints: 3 ok" in done.output) == (0, True)
    assert run("inspect", folder).output.count("epoch_") == 3
    assert verify(folder).status == "unreadable"
    assert run("convert", "--ranks", folder, tmp_path / "x.pt").exit_code == 0
    assert len(torch.load(tmp_path / "x.pt")["epoch"]) == 4


def test_folders_of_others(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.safetensors.index.json", "__0_0.distcp", ".metadata"):
        folder = folder_of(tmp_path / name, "a_0.pt")
        said(folder, 1)
        (folder / name).write_bytes(b"\x80\x02}.")
        assert find_rank_folder(folder) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        dcp.save({"a": torch.ones(3)}, checkpoint_id=str(tmp_path / "dcp"))
    put(tmp_path / "dcp" / "model_0.pt")
    assert verify(tmp_path / "dcp").format == "dcp"
    assert find_rank_folder(tmp_path / "missing") is None
    assert find_rank_folder(put(tmp_path / "file_0.pt")) is None


def test_links_and_what_is_no_file(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "c", "a_0.pt")
    said(folder, 2)
    (folder / "a_1.pt").symlink_to(put(tmp_path / "elsewhere"))
    assert verify(folder).ok
    assert verify(folder).format == "torch_checkpointing"
    (tmp_path / "elsewhere").unlink()
    report = verify(folder)
    assert report.status == "unreadable"
    assert report.notes[-1] == "a_1.pt: No such file or directory"
    with pytest.raises(FileNotFoundError, match=r"a_1\.pt"):
        inspect(folder)
    (folder / "a_1.pt").unlink()
    os.mkfifo(folder / "a_1.pt")
    assert verify(folder).notes[-1] == "a_1.pt: not a regular file"
    with pytest.raises(UnreadableCheckpointError, match=r"a_1\.pt: not a regular file"):
        inspect(folder)


# -- verify ----------------------------------------------------------------------------------------


def test_damage_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "c", "a_0.pt", "a_1.pt", "b_0.pt", "b_1.pt")
    said(folder, 2)
    size = (folder / "b_1.pt").stat().st_size
    flip(folder / "b_1.pt", size // 2)
    os.truncate(folder / "a_1.pt", size // 2)
    report = verify(folder)
    assert report.status == "damaged"
    assert [(one.file, one.kind, one.record) for one in report.problems] == [
        ("a_1.pt", "truncated", None),
        ("b_1.pt", "checksum", "data/0"),
    ]
    assert report.problems[1].tensors == ("w",)
    assert report.records > 20
    done = run("verify", tmp_path)
    assert done.exit_code == 1
    for text in ("torch_checkpointing", "b_1.pt", "data/0", "a_1.pt"):
        assert text in done.output
    found = json.loads(run("verify", "--json", tmp_path).output)
    assert [one["path"] for one in found["files"]] == [str(folder)]
    with pytest.raises(CorruptCheckpointError, match=r"c/a_1\.pt: .*truncated"):
        convert(folder, tmp_path / "x.pt", verify=True)
    (folder / "a_1.pt").write_bytes(b"")
    report = verify(folder)
    assert [one.kind for one in report.problems] == ["truncated", "checksum"]
    assert report.problems[0].message == "the file is empty"


def test_all_heads_may_be_damaged_but_one(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "c", "a_0.pt", "a_1.pt", "a_2.pt")
    said(folder, 3)
    flip(folder / "a_0.pt", 1)
    flip(folder / "a_1.pt", 2)
    report = verify(folder)
    assert report.format == "torch_checkpointing"
    assert {one.file for one in report.problems} == {"a_0.pt", "a_1.pt"}


def test_metadata_tells_of_missing_files(tmp_path: Path) -> None:
    """With it, the folder is known by fewer files."""
    folder = folder_of(tmp_path / "c", "a_0.pt", "a_2.pt", "b_0.pt", "b_2.pt")
    told = said(folder, 3)
    report = verify(folder)
    assert [(one.file, one.kind) for one in report.problems] == [("metadata.pkl", "missing")]
    assert report.problems[0].message == "it was saved by 3 ranks, and there are files of 2"
    put(folder / "a_1.pt")
    put(folder / "b_1.pt")
    assert verify(folder).ok
    said(folder, 4)
    assert verify(folder).status == "damaged"
    assert "metadata.pkl: it was saved by 4 ranks" in inspect(folder).notes
    for data in (b"", b"\x80\x04}q", pickle.dumps([1]), pickle.dumps({"world_size": "3"})):
        told.write_bytes(data)
        report = verify(folder)
        assert [(one.file, one.kind) for one in report.problems] == [("metadata.pkl", "pickle")]
        with pytest.raises(CorruptCheckpointError, match=r"metadata\.pkl"):
            inspect(folder)


class Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/fastserial-was-run",)


def test_no_pickle_is_run(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "c", "a_0.pt", "a_1.pt")
    with (folder / "a_1.pt").open("wb") as file:
        torch.save({"x": Runs()}, file)
    (folder / "metadata.pkl").write_bytes(pickle.dumps({"world_size": 2, "x": Runs()}))
    assert verify(folder).ok
    assert "posix.mkdir" in inspect(folder).imports
    with pytest.raises(fastserial.FastserialError, match=r"a_1\.pt"):
        convert(folder, tmp_path / "x.pt")
    assert not Path("/tmp/fastserial-was-run").exists()
    assert os.listdir(tmp_path) == ["c"]


# -- inspect ---------------------------------------------------------------------------------------


def test_what_is_in_a_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "c", "model_0.pt", "model_1.pt")
    put(folder / "step_0.pt", torch.ones(2))
    said(folder, 2)
    found = inspect(folder)
    assert (found.path, found.format) == (str(folder), "torch_checkpointing")
    assert [(one.key, one.kind, one.storage) for one in found.tensors] == [
        ("model.w", "tensor, rank 0", "model_0.pt: 0"),
        ("model.w", "tensor, rank 1", "model_1.pt: 0"),
        ("step", "tensor, rank 0", "step_0.pt: 0"),
    ]
    assert found.hints[:2] == ("items: model, step", "ranks 0 to 1")
    assert found.notes == ("step: there is no file of rank 1",)
    assert found.values == 2
    assert found.wasted_bytes == 0
    for tensor, name in zip(found.tensors, ("model_0.pt", "model_1.pt", "step_0.pt"), strict=True):
        assert found.offset_of(tensor) == inspect(folder / name).storages[0].offset
    assert ("model_1.pt: data/0", found.offset_of(found.tensors[1]), 24000) in found.records
    done = run("inspect", tmp_path, "--records")
    assert done.exit_code == 0
    for text in ("model.w", "rank 1", "items: model, step; ranks 0 to 1", "model_1.pt: data.pkl"):
        assert text in done.output
    assert json.loads(run("inspect", folder, "--json").output)["format"] == "torch_checkpointing"
    os.truncate(folder / "model_1.pt", 100)
    done = run("inspect", folder)
    assert done.exit_code == 1
    assert "model_1.pt" in done.output
