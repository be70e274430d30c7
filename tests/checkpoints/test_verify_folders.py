"""`fastserial verify` of folders of ordinary files: nothing in them is passed over in silence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fastserial.checkpoints.verify.file_list import MARK
from fastserial.cli.main import app

safetensors_torch = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")


def command(*words: Any) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["verify", "--json", *map(str, words)])
    found: dict[str, Any] = json.loads(result.stdout)
    return result.exit_code, {os.path.basename(one["path"]): one for one in found["files"]}


def trainer_folder(path: Path) -> Path:
    """Make what the Trainer with a `CheckpointCallback` leaves."""
    path.mkdir()
    state = {f"layer.{i}": torch.randn(64, 64) for i in range(10)}
    safetensors_torch.save_file(state, path / "model.safetensors", {"format": "pt"})
    torch.save({"state": state}, path / "optimizer.pt")
    torch.save({"step": 3}, path / "scheduler.pt")
    (path / "trainer_state.json").write_text("{}")
    files = {one.name: one.stat().st_size for one in path.iterdir()}
    (path / MARK).write_text(json.dumps({"version": 1, "files": files}))
    return path


def test_a_whole_folder_of_the_trainer(tmp_path: Path) -> None:
    status, found = command(trainer_folder(tmp_path / "checkpoint-10"))
    assert status == 0
    assert sorted(found) == [MARK, "model.safetensors", "optimizer.pt", "scheduler.pt"]
    model = found["model.safetensors"]
    assert (model["format"], model["records"], model["checked_bytes"]) == ("safetensors", 10, 0)
    assert any("no checksums" in note for note in model["notes"])
    assert (found[MARK]["format"], found[MARK]["records"]) == ("file list", 4)


def test_weights_that_are_cut(tmp_path: Path) -> None:
    folder = trainer_folder(tmp_path / "checkpoint-10")
    os.truncate(folder / "model.safetensors", 100_000)
    (folder / MARK).unlink()
    status, found = command(folder)
    assert status == 1
    assert [name for name in found if found[name]["status"] != "ok"] == ["model.safetensors"]
    assert "the file at 100000" in found["model.safetensors"]["problems"][0]["message"]


@pytest.mark.parametrize("harm", ["missing", "shorter", "torn"])
def test_a_folder_is_compared_with_its_mark(harm: str, tmp_path: Path) -> None:
    folder = trainer_folder(tmp_path / "checkpoint-10")
    if harm == "missing":
        (folder / "optimizer.pt").unlink()
    elif harm == "shorter":
        torch.save({}, folder / "optimizer.pt")
    else:
        (folder / MARK).write_text("{")
    status, found = command(tmp_path)
    assert status == 1
    problem = found[MARK]["problems"][0]
    if harm != "torn":
        assert problem["file"] == "optimizer.pt"
    expected = {
        "missing": "not there",
        "shorter": "when the checkpoint was complete",
        "torn": "no list of files",
    }
    assert expected[harm] in problem["message"]


def test_shards_and_their_index(tmp_path: Path) -> None:
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name in names:
        safetensors_torch.save_file({name[:11]: torch.ones(3)}, tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {n[:11]: n for n in names}}))
    assert command(tmp_path)[0] == 0
    safetensors_torch.save_file({"other": torch.ones(3)}, tmp_path / names[0])
    status, found = command(tmp_path)
    assert (status, found[index.name]["problems"][0]["tensors"]) == (1, ["model-00001"])
    (tmp_path / names[0]).unlink()
    status, found = command(tmp_path)
    assert (status, found[index.name]["problems"][0]["file"]) == (1, names[0])


def test_links(tmp_path: Path) -> None:
    """As in Hugging Face's cache, whose snapshots are links to files elsewhere."""
    cache, folder = tmp_path / "blobs", tmp_path / "snapshot"
    cache.mkdir()
    folder.mkdir()
    torch.save({"a": torch.ones(2)}, cache / "0123")
    torch.save({"a": torch.ones(2)}, folder / "here.pt")
    (folder / "model.bin").symlink_to(cache / "0123")
    (folder / "last.pt").symlink_to("here.pt")  # which is checked anyway
    (folder / "gone.pt").symlink_to("nowhere.pt")
    status, found = command(folder)
    assert status == 2
    assert {name: one["status"] for name, one in found.items()} == {
        "gone.pt": "unreadable",
        "here.pt": "ok",
        "model.bin": "ok",
    }
