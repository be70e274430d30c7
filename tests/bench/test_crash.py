"""`fastserial demo --crash`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fastserial.bench import crash
from fastserial.cli.main import app


def test_what_is_left_of_a_killed_save(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["demo", "--crash", "--folder", str(tmp_path), "--size", "64MiB", "--runs", "2"]
    )
    assert done.exit_code == 0, done.output
    assert "stock torch" in done.output
    assert "fastserial" in done.output
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_overwrites_loses_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: where both saves overwrite the file, kills leave nothing, and that is said."""
    savers: dict[str, type[AbstractContextManager[None]]] = {"fastserial": nullcontext}
    monkeypatch.setattr(crash, "_SAVERS", savers)
    monkeypatch.setattr(crash, "_kill_a_save", _cut)
    done = CliRunner().invoke(
        app, ["demo", "--crash", "--folder", str(tmp_path), "--size", "1MiB", "--runs", "1"]
    )
    assert done.exit_code == 1
    assert "failed finding central directory" in done.output
    assert _row(done.output) == [0, 0, 0, 1]


def test_parts_of_two_checkpoints_are_not_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They load, which is worse."""
    monkeypatch.setattr(crash, "_SAVERS", {"fastserial": nullcontext})
    monkeypatch.setattr(crash, "_kill_a_save", _mix)
    words = ["demo", "--crash", "--folder", str(tmp_path), "--size", "1MiB", "--runs", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1
    assert _row(done.output) == [0, 0, 1, 0]


def _row(output: str) -> list[int]:
    """Return the counts: old, new, parts of both, nothing."""
    line = next(line for line in output.splitlines() if line.startswith("fastserial "))
    return [int(word) for word in line.split()[1:5]]


def _mix(name: str, path: Path, nbytes: int) -> None:
    torch.save({"step": 3, "weights": [torch.full((9,), 3.0), torch.full((9,), 2.0)]}, path)


def _cut(name: str, path: Path, nbytes: int) -> None:
    torch.save({"step": 3, "weights": [torch.ones(nbytes)]}, path)
    with path.open("r+b") as file:
        file.truncate(nbytes // 2)
