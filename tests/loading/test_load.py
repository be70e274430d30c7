"""torch.load with fastserial installed gives what stock gives."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from support.corpus import Case, name_of, saveable
from support.identity import fast, saver, stock
from support.loading import DEFAULT, FORCED, both, forced, last_report


@pytest.mark.parametrize(("case", "fmt"), saveable(loads=False), ids=name_of)
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


@pytest.mark.parametrize("value", [torch.ones(1), [torch.ones(2), torch.zeros(3000)]])
def test_a_switch_for_test_suites(
    value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch loads small files, of which the suites of frameworks consist; not with this switch."""
    path = tmp_path / "archive.pt"
    torch.save(value, path)
    with fast():
        torch.load(path)
        assert last_report().engine == "torch"
        monkeypatch.setenv("FASTSERIAL_SMALL_FILE", "0")
        torch.load(path)
        assert last_report().fallback is None
        assert last_report().engine == "threads"
