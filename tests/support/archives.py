"""Checkpoints as programs other than torch write or change them."""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import torch

from support.corpus import noise
from support.identity import stock_bytes

_DATED = (2020, 1, 2, 3, 4, 6)
_Record = tuple[str, bytes, int]


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return {"w": noise(20_000), "v": noise(9000), "e": torch.empty(0), "s": noise(300)}


def checkpoint(value: Any = None) -> bytes:
    """What stock torch writes."""
    return stock_bytes(state() if value is None else value)


class _Unseekable(io.RawIOBase):
    """A pipe, as zipfile sees it."""

    def __init__(self, out: io.BytesIO) -> None:
        self._out = out

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def write(self, data: Any) -> int:
        return self._out.write(data)


def _records(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return {name: file.read(name) for name in file.namelist()}


def rewritten(
    data: bytes,
    *,
    force_zip64: bool = False,
    streamed: bool = False,
    compression: int = zipfile.ZIP_STORED,
    comment: bytes = b"",
    change: Callable[[str, bytes], tuple[str, bytes] | None] = lambda name, body: (name, body),
    **options: Any,
) -> bytes:
    """The same records, by Python's zipfile."""
    out = io.BytesIO()
    target: Any = _Unseekable(out) if streamed else out
    with zipfile.ZipFile(target, "w", compression, **options) as file:
        file.comment = comment
        for name, body in _records(data).items():
            changed = change(name, body)
            if changed is None:
                continue
            entry = zipfile.ZipInfo(changed[0], _DATED)
            entry.compress_type = compression
            if comment:
                entry.comment = comment
                entry.extra = struct.pack("<HH4s", 0x7777, 4, b"abcd")
            with file.open(entry, "w", force_zip64=force_zip64) as stream:
                stream.write(changed[1])
    return out.getvalue()


def appended(data: bytes, *records: _Record) -> bytes:
    """More records, with how to compress them, by Python's zipfile."""
    out = io.BytesIO(data)
    with zipfile.ZipFile(out, "a") as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Duplicate name")
        for name, body, compression in records:
            file.writestr(name, body, compression)
    return out.getvalue()


def _with_ends(data: bytes, behind: bytes = b"", disk: int = 0, locator_disk: int = 0) -> bytes:
    """Torch's archive with bytes behind the entries of its directory, and other disk numbers.

    Args:
        disk: where the whole archive is.
        locator_disk: where the zip64 end record is.
    """
    at = len(data) - 22 - 20 - 56
    head, tail = bytearray(data[:at] + behind), bytearray(data[at:])
    start = int.from_bytes(tail[48:56], "little")
    size = len(head) - start
    for where, form, value in (
        (16, "<II", (disk, disk)),
        (40, "<Q", (size,)),
        (56 + 4, "<IQ", (locator_disk, len(head))),
        (76 + 4, "<HH", (disk, disk)),
        (76 + 12, "<I", (size,)),
    ):
        struct.pack_into(form, tail, where, *value)
    entry = start
    while (entry := head.find(b"PK\1\2", entry)) >= 0:
        struct.pack_into("<H", head, entry + 34, disk)
        entry += 46
    return bytes(head + tail)


def unusual() -> dict[str, bytes]:
    """Archives that torch's reader accepts, though no torch writes them."""
    data = checkpoint()
    at = data.rindex(b"archive/data/0") - 46
    local = int.from_bytes(data[at + 42 : at + 46], "little")

    def patched(at: int, value: bytes) -> bytes:
        return data[:at] + value + data[at + len(value) :]

    return {
        "digital signature": _with_ends(data, struct.pack("<4sH", b"PK\5\5", 20) + bytes(20)),
        "more behind the entries": _with_ends(data, b"more"),
        "a locator's disk": _with_ends(data, locator_disk=1),
        "on disk 1": _with_ends(data, disk=1),
        "an old end record's disk": patched(len(data) - 22 + 4, b"\2\0"),
        "another local name": patched(local + 30, b"A"),
    }


def _other(name: str, compression: int = zipfile.ZIP_STORED) -> _Record:
    return f"archive/{name}", b"some text" * 100, compression


REWRITTEN: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "without zip64": {"allowZip64": False},
    "zip64": {"force_zip64": True},
    "streamed": {"streamed": True},
    "streamed zip64": {"streamed": True, "force_zip64": True},
    "comments and extra fields": {"comment": b"hello"},
    "deflated": {"compression": zipfile.ZIP_DEFLATED},
    "streamed, deflated": {"streamed": True, "compression": zipfile.ZIP_DEFLATED},
    "streamed zip64, deflated": {
        "streamed": True,
        "force_zip64": True,
        "compression": zipfile.ZIP_DEFLATED,
    },
}

APPENDED: Mapping[str, tuple[_Record, ...]] = {
    "one": (_other("note.txt"),),
    "deflated": (_other("note.txt", zipfile.ZIP_DEFLATED),),
    "bzip2": (_other("note.txt", zipfile.ZIP_BZIP2),),
    "lzma": (_other("note.txt", zipfile.ZIP_LZMA),),
    "several": tuple(_other(f"note{i}.txt") for i in range(3)),
}


def hostile() -> dict[str, bytes]:
    """Archives of torch whose directory lies, by what it lies about."""
    data = checkpoint()
    at, other = (data.rindex(b"archive/data/" + key) - 46 for key in (b"0", b"1"))  # the entries
    end = len(data) - 22
    end64 = end - 20 - 56
    huge = struct.pack("<Q", 1 << 62)
    most = b"\xff" * 4

    def patched(at: int, value: bytes) -> bytes:
        return data[:at] + value + data[at + len(value) :]

    return {
        "size": patched(at + 20, b"\xfe\xff\xff\xff" * 2),
        "zip64 size without a value": patched(at + 20, most * 2),
        "offset past the end": patched(at + 42, b"\xf0\xff\xff\xff"),
        "offset of another record": patched(at + 42, bytes(4)),
        "same record twice": patched(other, data[at : at + 46]),
        "same name twice": patched(at + 46, b"archive/data/1"),
        "count": patched(end64 + 24, huge * 2),
        "directory size": patched(end64 + 40, huge),
        "directory offset": patched(end64 + 48, huge),
        "directory at the start": patched(end64 + 48, bytes(8)),
        "locator": patched(end - 20 + 8, huge),
        "locator of itself": patched(end - 20 + 8, struct.pack("<Q", end - 20)),
        "many disks": patched(end + 4, b"\1\0\2\0"),
        "comment": patched(end + 20, b"\xff\xff"),
        "encrypted": patched(at + 8, b"\x01"),
        "bzip2": patched(at + 10, b"\x0c"),
        "deflate bomb": patched(at + 10, b"\x08"),
        "name length": patched(at + 28, b"\xff\xff"),
        "extra length": patched(at + 30, b"\xff\xff"),
    }
