"""A network file system that fails for a moment: the save is repeated as a whole."""

from __future__ import annotations

import errno
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from mounts import Lab, need
from proofs import Proof
from states import listing
from support.identity import last_save

import fastserial

pytestmark = [pytest.mark.timeout(300), pytest.mark.proof("errors that pass")]

STATE: dict[str, Any] = {"weights": torch.arange(3 << 20), "step": 7}  # 24 MiB: by the engine
SMALL: dict[str, Any] = {"weights": torch.arange(1000), "step": 7}


@pytest.fixture
def where(lab: Lab) -> Path:
    need("fusermount")
    pytest.importorskip("fuse", reason="needs fusepy (pip install fusepy) and libfuse2")
    below = lab.folder / "below"
    below.mkdir()
    (lab.folder / "below.fails").write_text("write EIO 0")
    return lab.mirror(below, "--failing")


@pytest.mark.parametrize("state", [STATE, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("name", ["EIO", "ESTALE", "ETIMEDOUT"])
@pytest.mark.parametrize("call", ["create", "write", "fsync", "rename"])
def test_the_save_is_repeated(
    call: str,
    name: str,
    state: dict[str, Any],
    where: Path,
    lab: Lab,
    tmp_path: Path,
    proof: Proof,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path, stock = where / "x.pt", tmp_path / "x.pt"
    torch.save(state, stock)
    fastserial.install()
    torch.save({"old": 1}, path)
    (lab.folder / "below.fails").write_text(f"{call} {name} 2")
    with caplog.at_level(logging.WARNING, "fastserial"):
        torch.save(state, path)
    assert (lab.folder / "below.fails").read_text() == f"{call} {name} 0"
    assert path.read_bytes() == stock.read_bytes()
    assert listing(where) == ["x.pt"]
    assert "the save is repeated in 0.5 s" in caplog.text
    report = last_save()
    assert "the save was repeated after an error" in str(report.fallback)
    proof.count(f"{call}: repeated")


def test_a_save_in_the_background_is_repeated(where: Path, lab: Lab, proof: Proof) -> None:
    fastserial.install()
    (lab.folder / "below.fails").write_text("write ESTALE 2")
    saving = fastserial.save_async(STATE, where / "x.pt")
    saving.wait()
    assert torch.equal(torch.load(where / "x.pt")["weights"], STATE["weights"])
    proof.count("in the background: repeated")


@pytest.mark.parametrize("seconds", [0, 2])
def test_an_error_that_stays(seconds: int, where: Path, lab: Lab, proof: Proof) -> None:
    path = where / "x.pt"
    fastserial.install(retry_seconds=seconds)
    torch.save(SMALL, path)
    old = path.read_bytes()
    (lab.folder / "below.fails").write_text("write ESTALE 1000")
    began = time.perf_counter()
    with pytest.raises(fastserial.WriteError, match="the previous file is intact") as caught:
        torch.save(STATE, path)
    assert caught.value.errno == errno.ESTALE
    assert (time.perf_counter() - began > 1) is bool(seconds)
    assert path.read_bytes() == old
    assert listing(where) == ["x.pt"]
    proof.count("error that stays: old file")


def test_other_errors_are_raised_at_once(where: Path, lab: Lab) -> None:
    fastserial.install()
    (lab.folder / "below.fails").write_text("write EDQUOT 1000")
    with pytest.raises(fastserial.WriteError) as caught:
        torch.save(STATE, where / "x.pt")
    assert caught.value.errno == errno.EDQUOT
    assert (lab.folder / "below.fails").read_text() > "write EDQUOT 98"
    assert listing(where) == []
