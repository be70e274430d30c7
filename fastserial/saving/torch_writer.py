"""torch's own writer, called for what only it can decide.

It computes the hash of the record names for each save. The self-check compares our zip layout with
torch's, once, before fastserial is switched on: a torch whose C++ writer differs stays stock.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
from collections.abc import Collection
from typing import Any

import torch

from fastserial import trace
from fastserial.checksums import crc32
from fastserial.formats.zip_layout import ZipLayout, ZipPlan

_VERSION = b"3\n"
_DIGITS = 20
DEFAULT_ALIGNMENT = 64


def has_alignment() -> bool:
    """Return whether this torch can align storages (since 2.7)."""
    return hasattr(torch.serialization, "_get_storage_alignment")


def alignment() -> int:
    """Return the storage alignment torch would use now, in bytes."""
    return (
        int(torch.serialization._get_storage_alignment()) if has_alignment() else DEFAULT_ALIGNMENT
    )


def checksums_wanted() -> bool:
    """Return whether torch would compute CRC-32s now (`set_crc32_options`)."""
    return bool(torch.serialization.get_crc32_options())


def new_writer(sink: Any, align: int) -> Any:
    """Return torch's own writer of archives, which gives its bytes to `sink`."""
    more = (align,) if has_alignment() else ()
    return torch._C.PyTorchFileWriter(sink, True, *more)


@trace.traced("layout")
def finish(layout: ZipLayout) -> ZipPlan:
    """Add what torch's writer adds at the end of an archive, and return the plan."""
    digits = _names_hash(layout.names)
    layout.add_bytes("version", _VERSION, crc32(_VERSION))
    if "byteorder" not in layout.names:
        order = sys.byteorder.encode()
        layout.add_bytes("byteorder", order, crc32(order))
    return layout.finish(digits, crc32)


# The same state is saved again and again. By a digest of the names, which may take 60 MB.
_hashes: dict[bytes, str] = {}
_MOST_HASHES = 64


def _names_hash(names: Collection[str]) -> str:
    """Return the 20 digits of the serialization id that torch derives from the record names.

    torch's writer runs over empty records into the null device: their order in its hash set, and
    with it the digits, depends on the names alone.
    """
    text = "\0".join((str(len(names)), *names)).encode("utf-8", "surrogatepass")
    key = hashlib.blake2b(text).digest()
    if (known := _hashes.get(key)) is not None:
        return known
    writer = _discarding_writer()
    record = writer.write_record_metadata
    for name in names:
        record(name, 0)
    writer.write_end_of_file()
    found = str(writer.serialization_id())[:_DIGITS]
    if len(_hashes) >= _MOST_HASHES:
        _hashes.clear()
    _hashes[key] = found
    return found


def _discarding_writer() -> Any:
    with contextlib.suppress(OSError, RuntimeError):  # no such device, or no descriptor free
        # torch would create a missing one as an ordinary file, which other programs would then fill
        if stat.S_ISCHR(os.stat(os.devnull).st_mode):
            return new_writer(os.devnull, DEFAULT_ALIGNMENT)
    return new_writer(PieceSink(), DEFAULT_ALIGNMENT)


class PieceSink:
    """Collects what torch's writer emits, joined; what it skips is a gap."""

    def __init__(self) -> None:
        self.position = 0
        self.pieces: list[tuple[int, bytearray]] = []

    def write(self, data: Any) -> int:
        text = bytes(data)
        last = self.pieces[-1] if self.pieces else None
        if last is not None and last[0] + len(last[1]) == self.position:
            last[1].extend(text)
        else:
            self.pieces.append((self.position, bytearray(text)))
        self.position += len(text)
        return len(text)

    def seek(self, offset: int, whence: int = 0) -> int:
        self.position = offset + (self.position if whence == 1 else 0)
        return self.position

    def flush(self) -> None:
        pass
