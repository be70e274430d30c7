"""Small files, and many small storages: torch reads them itself where that is quicker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support.identity import digest, fast, stock
from support.loading import last_report

from fastserial.files.linux import cached_fraction


@pytest.mark.parametrize(("count", "nbytes"), [(2200, 16_000), (120, 300_000)])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_who_reads_them(tmp_path: Path, zipped: bool, count: int, nbytes: int) -> None:
    path = tmp_path / "state.pt"
    state = {str(number): torch.rand(nbytes // 4) for number in range(count)}
    with stock():
        torch.save(state, path, _use_new_zipfile_serialization=zipped)
    with fast():
        assert digest(torch.load(path)) == digest(state)
    report = last_report()
    ours = report.engine != "torch"
    assert ours == (count == 120)
    assert ours != (report.fallback or "").startswith("many small")


@pytest.mark.parametrize(
    ("nbytes", "cached", "ours"),
    [
        (12 << 20, False, False),
        (20 << 20, True, False),
        (20 << 20, False, True),
        (36 << 20, True, True),
    ],
)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_small_files(tmp_path: Path, zipped: bool, nbytes: int, cached: bool, ours: bool) -> None:
    path = tmp_path / "state.pt"
    state = [torch.rand(nbytes // 8) for _ in range(2)]
    with stock():
        torch.save(state, path, _use_new_zipfile_serialization=zipped)
    with path.open("rb") as file:
        if not cached:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if cached_fraction(file.fileno(), 0, nbytes):
                pytest.skip("this file system keeps files in memory")
    with fast():
        assert digest(torch.load(path)) == digest(state)
    report = last_report()
    assert (report.engine != "torch") == ours
    assert ours != (report.fallback == "a small file")
