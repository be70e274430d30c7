"""Folders of torch_checkpointing: which they are, and what `verify` finds in them."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.damage import flip
from typer.testing import CliRunner

import fastserial
from fastserial import convert, inspect, verify
from fastserial.checkpoints.rank_folder import ranks_of_items
from fastserial.checkpoints.verify import checkpoints_in
from fastserial.cli.main import app
from fastserial.errors import ConvertError


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


@pytest.mark.parametrize("name", ITS)
def test_its_folders(name: str, tmp_path: Path) -> None:
    names, expected = ITS[name]
    folder = folder_of(tmp_path / "c", *names)
    (folder / "config_0.json").write_text("{}")
    (folder / "below").mkdir()
    assert ranks_of_items(folder) == expected
    assert [*checkpoints_in(tmp_path)] == [str(folder / one) for one in sorted(names)]
    told = said(folder, 1 + max(max(ranks) for ranks in expected.values()))
    assert ranks_of_items(folder) == expected
    report = verify(told)
    assert (report.status, report.format, report.records) == ("ok", "file list", len(names))


NOT_ITS = {
    "steps": ["ckpt_100.pt", "ckpt_200.pt"],
    "a date": ["a_0.pt", "a_20260101.pt"],
    "leading zeros": ["a_00.pt", "a_01.pt"],
    "another file": ["a_0.pt", "best.pt"],
    "Lightning": ["a_0.pt", "last.ckpt"],
    "nothing": [],
}


@pytest.mark.parametrize("name", NOT_ITS)
def test_other_folders(name: str, tmp_path: Path) -> None:
    """A file with the name of its metadata changes nothing."""
    folder = folder_of(tmp_path / "c", *NOT_ITS[name])
    said(folder, 2)
    assert ranks_of_items(folder) == {}
    assert [*checkpoints_in(tmp_path)] == [str(folder / one) for one in sorted(NOT_ITS[name])]
    assert verify(folder).status == "unreadable"


def test_files_of_ranks_or_epochs_are_not_put_together(tmp_path: Path) -> None:
    """Nothing says that they are one checkpoint."""
    folder = tmp_path / "c"
    folder.mkdir()
    for epoch in range(3):
        value = {"frozen": torch.ones(3), f"head {epoch}": epoch}
        torch.save(value, folder / f"epoch_{epoch}.pt")
    with pytest.raises(ConvertError, match="a file for each rank"):
        convert(folder, tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()
    done = run("verify", folder)
    assert (done.exit_code, "3 checkpoints: 3 ok" in done.output) == (0, True)
    assert run("inspect", folder).output.count("epoch_") == 3
    assert verify(folder).status == "unreadable"
    assert run("convert", folder, tmp_path / "x.pt").exit_code != 0


# -- verify ----------------------------------------------------------------------------------------


def test_damage_is_named(tmp_path: Path) -> None:
    """Each file has a report; what says how many ranks there were is a list of files."""
    folder = folder_of(tmp_path / "c", "a_0.pt", "a_1.pt", "b_0.pt", "b_1.pt")
    told = said(folder, 2)
    assert run("verify", tmp_path).exit_code == 0
    flip(folder / "b_1.pt", (folder / "b_1.pt").stat().st_size // 2)
    done = run("verify", "--json", tmp_path)
    assert done.exit_code == 1
    found = {one["path"]: one["status"] for one in json.loads(done.output)["files"]}
    assert found == {
        **{str(folder / name): "ok" for name in ("a_0.pt", "a_1.pt", "b_0.pt")},
        str(folder / "b_1.pt"): "damaged",
        str(told): "ok",
    }


@pytest.mark.parametrize("ranks", [3, 4])
def test_metadata_tells_of_missing_files(ranks: int, tmp_path: Path) -> None:
    """With it, the folder is known by fewer files."""
    folder = folder_of(tmp_path / "c", "a_0.pt", "a_2.pt", "b_0.pt", "b_2.pt")
    report = verify(said(folder, ranks))
    assert [(one.file, one.kind) for one in report.problems] == [("metadata.pkl", "missing")]
    expected = f"it was saved by {ranks} ranks, and there are files of 2"
    assert report.problems[0].message == expected


class Runs:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/fastserial-was-run",)


def test_no_pickle_is_run(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "c", "a_0.pt", "a_1.pt")
    with (folder / "a_1.pt").open("wb") as file:
        torch.save({"x": Runs()}, file)
    (folder / "metadata.pkl").write_bytes(pickle.dumps({"world_size": 2, "x": Runs()}))
    assert run("verify", folder).exit_code == 0
    assert "posix.mkdir" in inspect(folder / "a_1.pt").imports
    with pytest.raises(fastserial.FastserialError, match=r"a_1\.pt"):
        convert(folder / "a_1.pt", tmp_path / "x.pt")
    assert not Path("/tmp/fastserial-was-run").exists()
    assert os.listdir(tmp_path) == ["c"]
