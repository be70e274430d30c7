"""File systems that lack what a replacement needs: saved there as stock does, and nothing left."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from mounts import Lab, need
from support.identity import difference, fast, last_save, stock

from fastserial import summary
from fastserial.reports import SAVES

pytestmark = pytest.mark.timeout(300)

_IN_ORDER = "the file system only takes the bytes of a file sequentially"
_NO_RENAME = "the file system cannot rename a file over another"
_NO_SYNC = "the file system cannot sync a file"
_STATES: list[dict[str, Any]] = [
    {"a": torch.arange(3000.0)},
    {"a": torch.arange(3_000_000.0), "b": [torch.full((70_000,), i) for i in range(5)]},
    {str(i): torch.full((3000,), i) for i in range(900)},
]


@pytest.fixture(params=["zip", "legacy"])
def use_zip(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "zip")


def mounted(lab: Lab, *options: str) -> Path:
    need("fusermount")
    pytest.importorskip("fuse", reason="needs fusepy (pip install fusepy) and libfuse2")
    below = lab.folder / "below"
    below.mkdir()
    return lab.mirror(below, *options)


@pytest.mark.parametrize(
    ("options", "by_torch"),
    [
        (["--sequential"], _IN_ORDER),
        (["--no-rename"], _NO_RENAME),
        (["--no-replace"], _NO_RENAME),
        (["--no-sync"], None),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_lacks_something(
    options: list[str], by_torch: str | None, use_zip: bool, lab: Lab
) -> None:
    """New files, and files over others; no other file is there afterwards."""
    folder = mounted(lab, *options)
    for number, state in enumerate(_STATES):
        kept = lab.folder / f"{number}.pt"
        path = folder / f"{number}.pt"
        with stock():
            torch.save(state, kept, _use_new_zipfile_serialization=use_zip)
            torch.save(state, path, _use_new_zipfile_serialization=use_zip)
        for durable in (True, False):
            with fast(durable=durable):
                SAVES.clear()
                torch.save(state, path, _use_new_zipfile_serialization=use_zip)
                reasons = [way.reason for way in summary().saves.why_torch]
            assert reasons == ([] if by_torch is None else [by_torch])
            assert difference(kept.read_bytes(), path.read_bytes()) is None
            if by_torch is None:
                report = last_save()
                assert report.durable is (durable and "--no-sync" not in options)
                synced = not durable or "--no-sync" not in options
                assert report.fallback == (None if synced else _NO_SYNC)
        new = folder / "new" / path.name
        new.parent.mkdir(exist_ok=True)
        with fast():
            torch.save(state, new, _use_new_zipfile_serialization=use_zip)
        assert difference(kept.read_bytes(), new.read_bytes()) is None
    names = [f"{number}.pt" for number in range(len(_STATES))]
    for place in (folder, lab.folder / "below"):
        assert sorted(os.listdir(place / "new")) == names
        assert sorted(os.listdir(place)) == [*names, "new"]
