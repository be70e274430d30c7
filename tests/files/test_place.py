"""Where a save goes: to a new file or into the old one, and to the file that stock would write."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest
import torch
from support.identity import SMALL, fast, last_save
from support.processes import run

import fastserial

HELD = "this process has the file open or locked"


# -- files that this process has open ----------------------------------------------------------


def test_a_lock_stays_on_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    with path.open("rb") as mine, fast():
        fcntl.flock(mine, fcntl.LOCK_EX)
        torch.save(SMALL, path)
        with path.open("rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_file_that_is_open_for_reading_is_replaced(tmp_path: Path) -> None:
    """A leaked handle does not make the save less safe."""
    path = tmp_path / "a.pt"
    with fast():
        torch.save("old", path)
        with path.open("rb") as held:
            torch.save("new", path)
            assert last_save().fallback is None
            assert (torch.load(held), torch.load(path)) == ("old", "new")


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the program has x86-64's numbers")
def test_system_calls_that_a_filter_refuses(tmp_path: Path) -> None:
    """A container's seccomp profile says EPERM or ENOSYS; stock torch needs none of these calls."""
    assert json.loads(run("filtered", tmp_path).out) == {}


def test_a_mapped_file_is_replaced(tmp_path: Path) -> None:
    """Emptied, as by stock, it would kill the process that touches the old tensors."""
    path = tmp_path / "a.pt"
    with fast():
        torch.save({"x": torch.arange(300_000.0)}, path)
        mapped = torch.load(path, mmap=True)["x"]
        torch.save(SMALL, path)
        assert last_save().fallback is None
    assert mapped.equal(torch.arange(300_000.0))


# -- callers that have no stock behind them ----------------------------------------------------


def test_a_writer_says_what_to_do_instead(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    with path.open("r+b"), pytest.raises(fastserial.WriteError) as caught:
        fastserial.FastFileWriter(path)
    text = str(caught.value)
    assert HELD in text
    assert "close the file before it is saved to" in text
    assert "Save to another path" in text
    assert str(path) in text
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.pt"]
