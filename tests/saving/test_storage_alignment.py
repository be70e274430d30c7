"""Files for direct reads to a device: torch's setting `storage_alignment`, from torch 2.7 on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpus import noise
from support.identity import stock

import fastserial
from fastserial.formats.source import DescriptorSource
from fastserial.formats.zip.directory import read_directory
from fastserial.saving.torch_writer import DEFAULT_ALIGNMENT, has_alignment

pytestmark = pytest.mark.skipif(not has_alignment(), reason="torch 2.6 has no such setting")
PAGE = 4096


@pytest.fixture
def settings() -> Iterator[Any]:
    from torch.utils.serialization import config

    before = config.save.storage_alignment
    yield config.save
    config.save.storage_alignment = before
    fastserial.uninstall()


def state() -> dict[str, torch.Tensor]:
    sizes = (1, 1000, PAGE, 2 * PAGE, 300_000, 0)
    return {str(size): noise(size) for size in sizes}


def offsets(path: Path) -> list[int]:
    with path.open("rb") as file:
        directory = read_directory(DescriptorSource(file.fileno()))
    records = [record for record in directory.records if record.name.startswith("data/")]
    return [record.data_offset for record in records if record.size]


@pytest.mark.parametrize("alignment", [DEFAULT_ALIGNMENT, 512, PAGE, 32 * 1024])
def test_bytes_of_stock(tmp_path: Path, settings: Any, alignment: int) -> None:
    settings.storage_alignment = alignment
    value = state()
    path = tmp_path / "a.pt"
    with stock():
        torch.save(value, path)
    wanted = path.read_bytes()
    for options in ({}, {"small_file": 0, "block_size": 64 * 1024, "durable": False}):
        fastserial.install(**options)
        torch.save(value, path)
        assert path.read_bytes() == wanted
        loaded = torch.load(path)
        assert all(torch.equal(loaded[name], tensor) for name, tensor in value.items())
    assert all(offset % alignment == 0 for offset in offsets(path))


def test_what_it_costs(tmp_path: Path, settings: Any) -> None:
    """At most a page for each record; as much for storages whose sizes are whole pages."""
    fastserial.install()
    value = {str(index): noise(4 * PAGE) for index in range(50)}
    torch.save(value, tmp_path / "a.pt")
    settings.storage_alignment = PAGE
    torch.save(value, tmp_path / "b.pt")
    cost = (tmp_path / "b.pt").stat().st_size - (tmp_path / "a.pt").stat().st_size
    others = 6  # data.pkl, .format_version, .storage_alignment, byteorder, version, and the id
    assert 0.9 * PAGE * len(value) < cost <= PAGE * (len(value) + others)
