"""Which format a file is in: its first bytes say, or else its name, or else its end."""

from __future__ import annotations

import enum
import os
import stat

from fastserial.errors import (
    CheckpointFileError,
    CorruptCheckpointError,
    TruncatedCheckpointError,
    UnreadableCheckpointError,
)
from fastserial.formats.byte_stream import ByteStream
from fastserial.formats.legacy.structure import MAGIC
from fastserial.formats.pickles import decode
from fastserial.formats.source import BytesSource, DescriptorSource, Source
from fastserial.formats.zip.directory import read_directory
from fastserial.formats.zip.structs import LOCAL_SIGNATURE

__all__ = ["Format", "checkpoint_format", "detect", "format_of_head"]

_MAGIC_AT_MOST = 64  # bytes of a legacy file's first pickle in any pickle protocol


class Format(enum.Enum):
    """What a file is: the format's name for the first three, or why it is no checkpoint."""

    ZIP = "zip"
    LEGACY = "legacy"
    SAFETENSORS = "safetensors"
    DAMAGED_ZIP = "the first bytes of the archive are damaged"
    SHARD = "a shard of torch.distributed.checkpoint, which holds many small archives"
    FOLDER = "a directory, and none that torch.distributed.checkpoint saved to: give a file"
    SPECIAL = "not a regular file"
    EMPTY = "the file is empty"
    OTHER = "neither a zip, a legacy nor a safetensors checkpoint"


def format_of_head(source: Source) -> Format | None:
    """Return the format that a file's first bytes show (zip as torch tells it), or None.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        head = source.read_at(0, min(_MAGIC_AT_MOST, source.size))
    except TruncatedCheckpointError:  # a log that is emptied meanwhile, a file of the kernel's
        return None
    if head.startswith(LOCAL_SIGNATURE):
        return Format.ZIP
    try:
        value = decode(ByteStream(BytesSource(head))).value
    except CheckpointFileError:
        return None
    return Format.LEGACY if type(value) is int and value == MAGIC else None


def detect(fd: int, name: str) -> Format:
    """Return what an open file is.

    Args:
        fd: its descriptor; positions are not used.
        name: its path.

    Raises:
        OSError: the file cannot be read.
    """
    found = os.fstat(fd)
    if stat.S_ISDIR(found.st_mode):
        return Format.FOLDER
    if not stat.S_ISREG(found.st_mode):
        return Format.SPECIAL
    if not found.st_size:
        return Format.EMPTY
    if name.endswith(".distcp"):
        return Format.SHARD
    source = DescriptorSource(fd)
    head = format_of_head(source)
    if head is not None:
        return head
    if name.endswith(".safetensors"):
        return Format.SAFETENSORS
    try:
        read_directory(source, headers=False)
    except CheckpointFileError:
        return Format.OTHER
    return Format.DAMAGED_ZIP


def checkpoint_format(fd: int, name: str) -> Format:
    """Return `ZIP`, `LEGACY` or `SAFETENSORS`.

    Raises:
        CorruptCheckpointError: the file is damaged.
        UnreadableCheckpointError: it is nothing of these.
        OSError: it cannot be read.
    """
    found = detect(fd, name)
    if found is Format.DAMAGED_ZIP:
        raise CorruptCheckpointError(found.value, offset=0)
    if found not in (Format.ZIP, Format.LEGACY, Format.SAFETENSORS):
        raise UnreadableCheckpointError(found.value)
    return found
