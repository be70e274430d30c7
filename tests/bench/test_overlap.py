"""`fastserial bench overlap` and `bench gil`: what they tell, at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastserial.bench.studies import gil, overlap
from fastserial.cli.main import app

OURS = {"fastserial, blocking", "fastserial, copy", "fastserial, in place"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "settle", lambda pause: None)
    monkeypatch.setattr(gil, "settle", lambda pause: None)
    monkeypatch.setattr(gil, "sleep", lambda seconds: None)


@pytest.mark.filterwarnings("ignore")
def test_overlap(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    words = ["--model", "tiny", "--tokens", "16", "--batch", "1", "--every", "2", "--saves", "1"]
    command = ["bench", "overlap", "--folder", str(tmp_path), "--json", str(found), "--runs", "2"]
    done = CliRunner().invoke(app, [*command, *words])
    assert done.exit_code == 0, done.output
    told = json.loads(found.read_text())
    ways = {way["name"]: way for way in told["ways"]}
    assert ways.keys() >= OURS | {"stock torch.save"}
    for name in (*OURS, "stock torch.save"):
        assert ways[name]["right"] is True
        assert len(ways[name]["seconds"]) == len(ways[name]["without"]) == 2
        assert len(ways[name]["steps"]) == 4
        assert len(ways[name]["stalls"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


@pytest.mark.filterwarnings("ignore")
def test_some_ways_only(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = ["bench", "overlap", "--folder", str(tmp_path), "--json", str(found), "--runs", "1"]
    words = ["--model", "tiny", "--tokens", "16", "--batch", "1", "--every", "1", "--saves", "1"]
    done = CliRunner().invoke(
        app, [*command, *words, "--way", "in place", "--way", "stock", "--threads", "1"]
    )
    assert done.exit_code == 0, done.output
    names = [way["name"] for way in json.loads(found.read_text())["ways"]]
    assert names == ["stock torch.save", "fastserial, in place"]
    done = CliRunner().invoke(app, [*command, *words, "--way", "x"])
    assert done.exit_code != 0


def test_an_unknown_model(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "overlap", "--folder", str(tmp_path), "--model", "x"])
    assert done.exit_code != 0
    assert "tiny" in str(done.exception or done.output)


def test_gil(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    command = ["bench", "gil", "--folder", str(tmp_path), "--size", "4MiB", "--runs", "2"]
    done = CliRunner().invoke(app, [*command, "--json", str(found)])
    assert done.exit_code == 0, done.output
    ways = {way["name"]: way for way in json.loads(found.read_text())["ways"]}
    assert ways.keys() >= {"stock torch.save in a thread", "fastserial, in place"}
    assert all(0 <= way["share"]["median"] <= 1 for way in ways.values())
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
