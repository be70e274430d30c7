"""Files that are not as they were written."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest


def flip(path: Path, at: int) -> None:
    """Flip a bit of a file's byte `at`."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


DAMAGES = ("bit", "half", "empty", "noise", "gone")


def damage(path: Path, how: str, dice: random.Random) -> None:
    """Damage a file in one of these ways; a bit or an end is any."""
    text = bytearray(path.read_bytes() or b"empty")
    if how == "bit":
        text[dice.randrange(len(text))] ^= 1 << dice.randrange(8)
    elif how == "half":
        del text[dice.randrange(len(text)) :]
    else:
        text = bytearray(b"noise" * 999 if how == "noise" else b"")
    path.unlink()
    if how != "gone":
        path.write_bytes(text)


def bad_sectors(monkeypatch: pytest.MonkeyPatch, *places: int) -> None:
    """Let reads of any file that take one of these bytes fail, as a damaged disk does."""
    pread, preadv = os.pread, os.preadv

    def check(offset: int, nbytes: int) -> None:
        if any(offset <= place < offset + nbytes for place in places):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def failing_pread(fd: int, nbytes: int, offset: int) -> bytes:
        check(offset, nbytes)
        return pread(fd, nbytes, offset)

    def failing_preadv(fd: int, buffers: Any, offset: int, *flags: int) -> int:
        check(offset, sum(map(len, buffers)))
        return preadv(fd, buffers, offset, *flags)

    monkeypatch.setattr(os, "pread", failing_pread)
    monkeypatch.setattr(os, "preadv", failing_preadv)
