"""`fastserial.summary()`: every save and load once, with the way it went, and why."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fastserial
from fastserial import reports
from fastserial.reasons import Reason

LARGE = {"x": torch.zeros(4_000_000)}
SMALL = {"x": torch.zeros(10)}


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    fastserial.wait_all()
    reports.SAVES.clear()
    reports.LOADS.clear()
    fastserial.install()
    yield
    fastserial.uninstall()


def test_a_save_without_install(tmp_path: Path) -> None:
    """It counts, and what is said of torch does not deny it."""
    fastserial.uninstall()
    stock = "torch.save and torch.load are stock (uninstall() was called)"
    assert str(fastserial.summary()).splitlines()[0] == f"fastserial: {stock}"
    fastserial.save_async(SMALL, tmp_path / "a.pt").wait()
    found = fastserial.summary()
    assert found.saves.count == 1
    first = str(found).splitlines()[0]
    assert first == f"fastserial: used through its own functions; {stock}"


def test_each_counts_once(tmp_path: Path) -> None:
    for name in "ab":
        torch.save(LARGE, tmp_path / name)
    with open(tmp_path / "c", "wb") as file:
        torch.save(LARGE, file)
    torch.save(LARGE, tmp_path / "d", _use_new_zipfile_serialization=False)
    fastserial.save_async(LARGE, tmp_path / "e").wait()
    fastserial.save_async(LARGE, tmp_path / "f", _use_new_zipfile_serialization=False).wait()
    with fastserial.options(small_file=0):
        for name in "abd":
            torch.load(tmp_path / name)
    found = fastserial.summary()
    sizes = {name: (tmp_path / name).stat().st_size for name in "abcdef"}
    assert (found.saves.count, found.saves.by_torch) == (6, 0)
    assert found.saves.nbytes == sum(sizes.values())
    assert found.saves.seconds > 0
    assert (found.loads.count, found.loads.by_torch) == (3, 1)  # legacy files are torch's
    assert 2 * 16_000_000 <= found.loads.nbytes <= sizes["a"] + sizes["b"]
    assert json.loads(json.dumps(dataclasses.asdict(found)))["saves"]["count"] == 6


def test_torchs_own_way_is_told_with_its_reason_and_the_remedy(tmp_path: Path) -> None:
    torch.save(SMALL, io.BytesIO())
    torch.save(SMALL, io.BytesIO())
    torch.save(LARGE, tmp_path / "a")
    torch.load(tmp_path / "a", mmap=True)
    found = fastserial.summary()
    assert (found.saves.count, found.saves.by_torch) == (3, 2)
    (why,) = found.saves.why_torch
    assert (why.count, why.reason) == (2, "not a plain file object")
    assert "give torch.save a path" in (why.remedy or "")
    assert found.loads.by_torch == 1
    assert found.loads.why_torch[0].reason == "mmap=True maps the file"
    text = str(found)
    assert "saves: 3, 1 by fastserial: 15.3MiB" in text
    assert "2 by torch itself: not a plain file object -> give torch.save a path" in text


def test_a_reason_is_text_that_knows_its_remedy() -> None:
    reason = Reason("the file is locked", "end the lock")
    assert (reason, reason.remedy) == ("the file is locked", "end the lock")
    for same in (copy.deepcopy(reason), pickle.loads(pickle.dumps(reason))):
        assert (same, same.remedy) == (reason, reason.remedy)
    assert json.dumps([reason]) == '["the file is locked"]'
