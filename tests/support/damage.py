"""Damaged and hostile files: from a seed, a flipped bit, sectors that cannot be read."""

from __future__ import annotations

import errno
import os
import random
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from support.archives import rewritten
from support.identity import stock_bytes

_EXTREMES = (0, 1, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF, 2**40, 2**62, 2**64 - 1)
_SIGNATURES = (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07")
_WAYS = "flip flip cut zero copy insert remove garbage append field field number".split()


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


@dataclass(frozen=True)
class Damaged:
    """A damaged file: what was done to it, its bytes, and if it is a zip of torch's."""

    what: str
    data: bytes
    original: str

    @property
    def must_be_found(self) -> bool:
        """Whether `verify` has to report it: all of a zip is covered, not all of a legacy file."""
        return self.original != "legacy"


def originals() -> dict[str, bytes]:
    """Return whole files of different kinds."""
    state = {
        "model": {f"layer.{i}.weight": torch.arange(40 + i, dtype=torch.float32) for i in range(5)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "lr": 0.1},
        "empty": torch.zeros(0),
        "tied": [torch.ones(3)] * 2,
        "bytes": torch.frombuffer(bytearray(b"PK\x07\x08PK\x03\x04PK\x05\x06"), dtype=torch.uint8),
        "half": torch.arange(3000, dtype=torch.bfloat16),
    }
    zipped = stock_bytes(state)
    return {
        "zip": zipped,
        "legacy": stock_bytes(state, "legacy"),
        "zip, protocol 4": stock_bytes(state, pickle_protocol=4),
        "deflated": rewritten(zipped, compression=zipfile.ZIP_DEFLATED),
    }


def _damage(data: bytearray, way: str, dice: random.Random) -> str:
    """Damage bytes in one way, and say where."""
    at, length = dice.randrange(len(data)), dice.choice([1, 8, 100, 600, 4096])
    piece = bytes(data[at : at + length])
    if way == "flip":
        for _ in range(dice.choice([1, 1, 2, 64])):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    elif way == "cut":
        del data[dice.choice([at, max(0, len(data) - dice.randrange(1, 100))]) :]
    elif way == "zero":
        data[at : at + length] = bytes(len(piece))
    elif way == "remove":
        del data[at : at + length]
    elif way == "garbage":
        data[at : at + length] = dice.randbytes(len(piece))
    elif way in ("copy", "insert"):
        to = dice.randrange(len(data))
        data[to : to + (len(piece) if way == "copy" else 0)] = piece
    elif way == "append":
        data += dice.choice([bytes(10), b"PK\x05\x06" + bytes(18), dice.randbytes(70000)])
    else:
        _put_number(data, way, dice)
    return f"{way} at {at}, {length} bytes"


def _put_number(data: bytearray, way: str, dice: random.Random) -> None:
    """Put a hostile number anywhere, as a length or a count, or into a field of a zip's header."""
    size, form = dice.choice([(1, "<B"), (2, "<H"), (4, "<I"), (8, "<Q")])
    start = dice.randrange(len(data))
    headers = [at for one in _SIGNATURES if (at := data.find(one, start)) >= 0]
    if way == "field" and headers:
        start = dice.choice(headers) + 4 + dice.randrange(48)
    value = dice.choice(_EXTREMES) if dice.random() < 0.8 else dice.randrange(len(data))
    data[start : start + size] = struct.pack(form, value & ((1 << 8 * size) - 1))


def damaged(whole: dict[str, bytes], dice: random.Random) -> Damaged:
    """Return one of the files, damaged in one to three ways, differing from the original."""
    name = dice.choice(list(whole))
    while True:
        data = bytearray(whole[name])
        ways = dice.choices(_WAYS, k=dice.choice([1, 1, 1, 2, 3]))
        done = [_damage(data, way, dice) for way in ways if data]
        if bytes(data) != whole[name]:
            return Damaged(f"{name}: {'; '.join(done)}", bytes(data), name)
