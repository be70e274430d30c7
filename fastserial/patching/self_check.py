"""Our zip layout compared with torch's own writer, before anything is switched on."""

from __future__ import annotations

import sys

import torch

from fastserial.checksums import crc32
from fastserial.formats.extents import Literal
from fastserial.formats.zip_layout import ZipLayout
from fastserial.memory.storages import HostMemory
from fastserial.saving.archive import (
    DEFAULT_ALIGNMENT,
    PieceSink,
    finish_layout,
    has_alignment,
    new_writer,
)

# Names and sizes that meet each rule: empty, small, behind the lookalike's signature, too large for
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


def _same_layout(align: int) -> bool:
    """Lay the probe out twice; return whether the bytes around the records are the same."""
    theirs, ours = PieceSink(), PieceSink()
    writer, layout = new_writer(theirs, align), ZipLayout("archive", align)
    for name, data in _PROBE:
        if isinstance(data, int):
            writer.write_record_metadata(name, data)
            layout.add_memory(name, HostMemory(0, data, None), b"", crc=0)
        else:
            writer.write_record(name, data, len(data))
            layout.add_bytes(name, data, crc32(data))
    writer.write_end_of_file()
    for extent in finish_layout(layout).extents:
        ours.seek(extent.offset)
        if isinstance(extent.source, Literal):
            ours.write(extent.source.data)
    return theirs.pieces == ours.pieces


def self_check() -> str | None:
    """Return why this torch must stay stock, or None if our zip layout equals its own."""
    if sys.byteorder != "little":
        return "big-endian machines are not supported"
    try:
        aligns = (DEFAULT_ALIGNMENT, 4096) if has_alignment() else (DEFAULT_ALIGNMENT,)
        same = all(map(_same_layout, aligns))
    except (AttributeError, TypeError) as error:
        return f"PyTorchFileWriter of torch {torch.__version__} has another interface: {error}"
    return None if same else f"torch {torch.__version__} lays the zip container out differently"
