"""torch.load with fastserial installed gives what stock gives."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpus import CASES, Case
from support.identity import saver, stock
from support.loading import DEFAULT, FORCED, both, forced


def runnable() -> list[Any]:
    """Parameters (case, format) that stock can save."""
    found = []
    for one in CASES.values():
        reason = one.missing()
        marks = [pytest.mark.skip(reason=reason)] if reason else []
        for fmt in one.formats:
            if fmt not in one.raises:
                found.append(pytest.param(one, fmt, id=f"{one.name}-{fmt}", marks=marks))
    return found


def saved(folder: Path, value: Any, fmt: str = "zip", **options: Any) -> Path:
    """A file that stock wrote."""
    path = folder / f"{fmt}.pt"
    with stock():
        torch.save(value, path, _use_new_zipfile_serialization=fmt == "zip", **options)
    return path


@pytest.mark.parametrize(("case", "fmt"), runnable())
def test_corpus(case: Case, fmt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, types, strides, shared storages, warnings and errors, with and without pickles."""
    path = tmp_path / "archive.pt"
    with stock(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saver(case, fmt, case.build())(path)
    forced_sets = () if case.large else (FORCED["direct"], FORCED["verified"])
    with forced(monkeypatch, 5000):
        both(lambda: torch.load(path, weights_only=False), DEFAULT, *forced_sets)
        both(lambda: torch.load(path, weights_only=True), FORCED["cached"], twice=False)
    path.unlink()
