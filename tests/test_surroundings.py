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


@pytest.mark.parametrize(
    ("count", "nbytes"), [(20, 8_000_000), (300, 3000), (300, 20_000), (6, 400_000)]
)
@pytest.mark.parametrize("form", ["zip", "legacy"])
def test_storages_resized_during_a_save(tmp_path: Path, form: str, count: int, nbytes: int) -> None:
    """Neither a crash nor a file that cannot be read: an error that names the file."""
    assert "refused" in run("resizing", tmp_path, form, count, nbytes, 1).out


@pytest.mark.parametrize("room", [10, 20, 60])
def test_a_save_with_little_address_space(tmp_path: Path, room: int) -> None:
    run("little_room", "SAVE", tmp_path / "f.pt", room, 0)
    assert list(torch.load(tmp_path / "f.pt")) == [f"t{i}" for i in range(10)]


def test_a_load_with_little_address_space(tmp_path: Path) -> None:
    assert "address space" in run("little_room", "LOAD", tmp_path / "f.pt", 450, 0).out


@pytest.mark.parametrize("descriptors", [1, 2, 3])
def test_a_save_with_few_descriptors(tmp_path: Path, descriptors: int) -> None:
    run("little_room", "SAVE", tmp_path / "f.pt", 0, descriptors)
    assert list(torch.load(tmp_path / "f.pt")) == [f"t{i}" for i in range(10)]
