"""Saves and loads where something usual is missing or something unusual is set."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.identity import fast
from support.processes import run

from fastserial import config

BLOCKS: dict[str, Any] = {"small_file": 0, "block_size": 65536, "queue_depth": 2}
STATE = {"a": torch.arange(300_000)}


def test_nothing_is_logged_for_a_save_and_a_load_that_went_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fastserial")
    for options in (BLOCKS, {}):
        for use_zip in (True, False):
            with fast(**options):
                torch.save(STATE, tmp_path / "f.pt", _use_new_zipfile_serialization=use_zip)
                torch.load(tmp_path / "f.pt")
    assert caplog.records == []


def test_a_misspelt_variable_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "_names_checked", False)
    monkeypatch.setenv("FASTSERIAL_BLOKSIZE", "1MiB")
    monkeypatch.setenv("FASTSERIAL_THREAD", "1")
    monkeypatch.setenv("FASTSERIAL_HOME_OF_SOMEBODY", "/")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with fast():
            config.current()
    told = [str(one.message) for one in found]
    assert len(told) == 2
    assert "FASTSERIAL_BLOKSIZE" in told[0]
    assert "FASTSERIAL_BLOCK_SIZE" in told[0]
    assert "FASTSERIAL_THREADS" in told[1]


@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_storages_resized_during_a_save(tmp_path: Path, form: str) -> None:
    """Neither a crash nor a file that cannot be read: an error that names the file."""
    sizes = ("20:8000000", "300:3000", "300:20000", "6:400000")
    ended = run("resizing", tmp_path, form, 0.5, *sizes).out.splitlines()
    assert ["refused" in line for line in ended] == [True] * 4


def test_saves_with_little_address_space_or_few_descriptors(tmp_path: Path) -> None:
    cases = ("10:0", "20:0", "60:0", "0:1", "0:2", "0:3")
    run("little_room", tmp_path, "SAVE", *cases)
    for case in cases:
        assert list(torch.load(tmp_path / f"{case}.pt")) == [f"t{i}" for i in range(10)]


def test_loads_with_little_address_space(tmp_path: Path) -> None:
    assert "address space" in run("little_room", tmp_path, "LOAD", "450:0").out
