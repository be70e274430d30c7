"""Many small storages: torch reads them itself where that is quicker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.identity import digest, fast, stock
from support.loading import last_report


@pytest.mark.parametrize(("count", "nbytes"), [(600, 16_000), (40, 300_000)])
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
    assert ours == (count == 40)
    assert ours != (report.fallback or "").startswith("many small")
