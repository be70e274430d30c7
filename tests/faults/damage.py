"""Damaged and hostile checkpoint files, from a seed."""

from __future__ import annotations

import io
import random
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Damaged", "damaged", "originals"]

_EXTREMES = (0, 1, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFE, 0xFFFFFFFF, 2**40, 2**62, 2**64 - 1)
_SIGNATURES = (b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07")


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
    found = {}
    for name, options in (
        ("zip", {}),
        ("legacy", {"_use_new_zipfile_serialization": False}),
        ("zip, protocol 4", {"pickle_protocol": 4}),
    ):
        out = io.BytesIO()
        torch.save(state, out, **options)
        found[name] = out.getvalue()
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(found["zip"])) as old,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    found["deflated"] = out.getvalue()
    return found


def _flip(data: bytearray, dice: random.Random) -> str:
    count = dice.choice([1, 1, 1, 2, 8, 64])
    for _ in range(count):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return f"{count} bits flipped"


def _truncate(data: bytearray, dice: random.Random) -> str:
    size = dice.choice([dice.randrange(len(data)), len(data) - dice.randrange(1, 100)])
    del data[max(0, size) :]
    return f"cut to {size} bytes"


def _zero(data: bytearray, dice: random.Random) -> str:
    start = dice.randrange(len(data))
    length = min(dice.choice([1, 16, 512, 4096]), len(data) - start)
    data[start : start + length] = bytes(length)
    return f"{length} zeros at {start}"


def _splice(data: bytearray, dice: random.Random) -> str:
    length = dice.randrange(1, 600)
    source, target = dice.randrange(len(data)), dice.randrange(len(data))
    piece = bytes(data[source : source + length])
    if dice.random() < 0.5:
        data[target : target + len(piece)] = piece
        return f"{len(piece)} bytes copied from {source} to {target}"
    data[target:target] = piece
    return f"{len(piece)} bytes inserted from {source} at {target}"


def _remove(data: bytearray, dice: random.Random) -> str:
    start, length = dice.randrange(len(data)), dice.randrange(1, 600)
    del data[start : start + length]
    return f"{length} bytes removed at {start}"


def _garbage(data: bytearray, dice: random.Random) -> str:
    start = dice.randrange(len(data))
    piece = dice.randbytes(dice.choice([1, 8, 100, 1000]))
    data[start : start + len(piece)] = piece
    return f"{len(piece)} random bytes at {start}"


def _extend(data: bytearray, dice: random.Random) -> str:
    piece = dice.choice([bytes(10), b"PK\x05\x06" + bytes(18), dice.randbytes(70000)])
    data += piece
    return f"{len(piece)} bytes appended"


def _field(data: bytearray, dice: random.Random) -> str:
    """Put a hostile number into a field of a zip header."""
    signature = dice.choice(_SIGNATURES)
    places = []
    at = data.find(signature)
    while at >= 0:
        places.append(at)
        at = data.find(signature, at + 1)
    if not places:
        return _garbage(data, dice)
    size, form = dice.choice([(2, "<H"), (4, "<I"), (8, "<Q")])
    start = dice.choice(places) + 4 + dice.randrange(48)
    value = dice.choice(_EXTREMES) if dice.random() < 0.7 else dice.randrange(len(data))
    value &= (1 << 8 * size) - 1
    data[start : start + size] = struct.pack(form, value)
    return f"{value} in a field of {size} bytes at {start}"


def _number(data: bytearray, dice: random.Random) -> str:
    """Put a hostile number anywhere, as a length of the pickle or a count of the legacy format."""
    size, form = dice.choice([(1, "<B"), (4, "<I"), (8, "<Q")])
    start = dice.randrange(max(1, len(data) - size))
    value = dice.choice(_EXTREMES) & ((1 << 8 * size) - 1)
    data[start : start + size] = struct.pack(form, value)
    return f"{value} in {size} bytes at {start}"


_WAYS: list[Callable[[bytearray, random.Random], str]] = [
    _flip, _flip, _truncate, _zero, _splice, _remove, _garbage, _extend, _field, _field, _number,
]  # fmt: skip


def damaged(whole: dict[str, bytes], dice: random.Random) -> Damaged:
    """Return one of the files, damaged in one to three ways, differing from the original."""
    name = dice.choice(list(whole))
    while True:
        data = bytearray(whole[name])
        done = [dice.choice(_WAYS)(data, dice) for _ in range(dice.choice([1, 1, 1, 2, 3])) if data]
        if bytes(data) != whole[name]:
            return Damaged(f"{name}: {'; '.join(done)}", bytes(data), name)
