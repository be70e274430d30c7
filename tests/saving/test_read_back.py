"""`read_back=True`: what was written is read back and compared."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
import torch

import fastserial
from fastserial.engines import Completion, Request
from fastserial.engines.threads import ThreadsEngine
from fastserial.errors import WriteError
from fastserial.saving import block_writer

SMALL_BLOCKS = {"small_file": 0, "block_size": 65536, "queue_depth": 2, "read_back": True}


class Lying(ThreadsEngine):
    """Changes one byte of a block after it was prepared, and writes that."""

    def _serve(self, request: Request) -> Completion:
        prepare = request.prepare

        def spoil(request: Request) -> None:
            if prepare is not None:
                prepare(request)
            self.kept = bytes(request.view)
            if request.offset == 2 * 65536:
                request.view[77] ^= 1

        request.prepare = spoil
        completion = super()._serve(request)
        request.view[:] = self.kept
        return completion


@pytest.mark.parametrize("direct", ["auto", False])
def test_good_save(tmp_path: Path, direct: bool) -> None:
    path = tmp_path / "a.pt"
    tensor = torch.arange(100_000)
    fastserial.install()
    with fastserial.options(direct=direct, **SMALL_BLOCKS):
        torch.save(tensor, path)
    fastserial.uninstall()
    assert torch.equal(torch.load(path), tensor)


@pytest.mark.parametrize("direct", ["auto", False])
def test_changed_byte(tmp_path: Path, direct: bool) -> None:
    """The save fails, and the old file is there."""
    path = tmp_path / "a.pt"
    path.write_bytes(b"old")
    fastserial.install()
    try:
        options = {**SMALL_BLOCKS, "direct": direct, "engine": lambda threads: Lying(1)}
        with (
            fastserial.options(**options),
            pytest.raises(WriteError, match="not what was written") as caught,
        ):
            torch.save(torch.arange(100_000), path)
    finally:
        fastserial.uninstall()
    assert caught.value.errno == errno.EIO
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.pt"]


@pytest.mark.parametrize("scarce", [False, True])
def test_the_report_says_that_nothing_is_read_back(
    tmp_path: Path, scarce: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A locked file is not opened once more, and without an engine there are no blocks to keep."""
    fastserial.install()
    if scarce:
        monkeypatch.setattr(block_writer, "has_room", lambda config: False)
    with open(tmp_path / "a.pt", "w+b") as file, fastserial.options(**SMALL_BLOCKS):
        if not scarce:
            fcntl.lockf(file, fcntl.LOCK_EX)
        torch.save(torch.arange(100_000), file)
    report = fastserial.last_save_report()
    assert report is not None
    assert "; not read back" in str(report.fallback)
