"""`fastserial.save`: what `torch.save` writes, without `install()`."""

from __future__ import annotations

import os
from pathlib import Path

import fastserial


def test_what_torch_has_to_write_itself(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert fastserial.save({"step": 3}, pipe) is None
        assert os.read(reader, 4)[:2] == b"PK"
    finally:
        os.close(reader)
