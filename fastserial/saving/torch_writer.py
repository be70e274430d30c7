"""torch's own writer, asked about what only it decides.

The hash of the record names is asked at every save. `self_check` compares our zip layout with
torch's, once, before fastserial is switched on: a torch whose C++ writer differs stays stock.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import sys
from typing import Any

import torch

from fastserial.checksums import crc32
from fastserial.containers.extents import Literal
from fastserial.containers.zip import ZipLayout, ZipPlan

__all__ = ["alignment", "checksums_wanted", "finish", "self_check"]

_VERSION = b"3\n"
_DIGITS = 20
_ALIGNMENT = 64


def _has_alignment() -> bool:
    return hasattr(torch.serialization, "_get_storage_alignment")  # since 2.7


def alignment() -> int:
    """Return the storage alignment torch would use now, in bytes."""
    return int(torch.serialization._get_storage_alignment()) if _has_alignment() else _ALIGNMENT


def checksums_wanted() -> bool:
    """Return whether torch would compute CRC-32s now (`set_crc32_options`)."""
    return bool(torch.serialization.get_crc32_options())


def _writer(sink: Any, align: int) -> Any:
    more = (align,) if _has_alignment() else ()
    return torch._C.PyTorchFileWriter(sink, True, *more)


def finish(layout: ZipLayout) -> ZipPlan:
    """Add what torch's writer adds at the end of an archive, and return the plan."""
    digits = _names_hash(tuple(layout.names))
    layout.add_bytes("version", _VERSION, crc32(_VERSION))
    if "byteorder" not in layout.names:
        order = sys.byteorder.encode()
        layout.add_bytes("byteorder", order, crc32(order))
    return layout.finish(digits, crc32)


@functools.lru_cache(maxsize=8)  # the same state is saved again and again
def _names_hash(names: tuple[str, ...]) -> str:
    """Return the 20 digits of the serialization id that torch derives from the record names.

    torch's writer runs over empty records into the null device: their order in its hash set, and
    with it the digits, depends on the names alone.
    """
    writer = _discarding_writer()
    record = writer.write_record_metadata
    for name in names:
        record(name, 0)
    writer.write_end_of_file()
    return str(writer.serialization_id())[:_DIGITS]


def _discarding_writer() -> Any:
    with contextlib.suppress(OSError, RuntimeError):  # no such device, or no descriptor free
        # torch would create what is missing, and in its place other programs would fill a file
        if stat.S_ISCHR(os.stat(os.devnull).st_mode):
            return _writer(os.devnull, _ALIGNMENT)
    return _writer(_Sink(), _ALIGNMENT)


class _Sink:
    """Takes what torch's writer emits, joined, with the places it skips as gaps."""

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


# Names and sizes that meet each rule: empty, small, behind the quirk's signature, too large for
# 32 bits, and behind 4 GiB. An int is a record without data.
_PROBE: tuple[tuple[str, bytes | int], ...] = (
    ("data.pkl", b"\x80\x02."),
    ("data/0", b"x" * 100),
    ("data/1", b""),
    ("data/2", b"PK\x07\x08quirk"),
    ("data/3", b"PK\x07\x08abc"),
    ("data/4", 0xFFFFFFFE - 4096),
    ("data/5", 0xFFFFFFFF),
    ("data/10", 5 << 30),
    ("data/11", 0),
    ("data/6", b"y"),
)


def _probe_theirs(align: int) -> list[tuple[int, bytearray]]:
    sink = _Sink()
    writer = _writer(sink, align)
    for name, data in _PROBE:
        if isinstance(data, int):
            writer.write_record_metadata(name, data)
        else:
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return sink.pieces


def _probe_ours(align: int) -> list[tuple[int, bytearray]]:
    layout = ZipLayout("archive", align)
    for name, data in _PROBE:
        if isinstance(data, int):
            layout.add_hole(name, data)
        else:
            layout.add_bytes(name, data, crc32(data))
    plan = finish(layout)
    sink = _Sink()
    for extent in plan.extents:
        sink.seek(extent.offset)
        if isinstance(extent.source, Literal):
            sink.write(extent.source.data)
    return sink.pieces


def self_check() -> str | None:
    """Return None if our zip layout equals the installed torch's, else what is different."""
    try:
        aligns = (_ALIGNMENT, 4096) if _has_alignment() else (_ALIGNMENT,)
        same = all(_probe_theirs(align) == _probe_ours(align) for align in aligns)
    except (AttributeError, TypeError) as error:
        return f"PyTorchFileWriter of torch {torch.__version__} has another interface: {error}"
    return None if same else f"torch {torch.__version__} lays the zip container out differently"
