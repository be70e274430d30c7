"""`fastserial.save`: what `torch.save` writes, without `install()`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import fastserial


@pytest.mark.parametrize("zip_container", [True, False])
def test_the_bytes_of_stock_and_a_report(tmp_path: Path, zip_container: bool) -> None:
    state = {"weight": torch.arange(300_000.0), "step": 3}
    ours, stock = tmp_path / "ours" / "x.pt", tmp_path / "stock" / "x.pt"
    for path in (ours, stock):
        path.parent.mkdir()
    report = fastserial.save(state, ours, zip_container=zip_container)
    torch.save(state, stock, _use_new_zipfile_serialization=zip_container)
    assert ours.read_bytes() == stock.read_bytes()
    assert report is not None
    assert (report.path, report.bytes) == (str(ours), stock.stat().st_size)
    assert not fastserial.installed()


def test_what_torch_has_to_write_itself(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert fastserial.save({"step": 3}, pipe) is None
        assert os.read(reader, 4)[:2] == b"PK"
    finally:
        os.close(reader)
