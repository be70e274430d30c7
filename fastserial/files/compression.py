"""Whether a file system compresses a file: then space cannot be reserved ahead for it.

Facts used: btrfs compresses neither what is written directly nor what was reserved before
(`fallocate`), and reserves the full size. ZFS and bcachefs compress by settings that no mount
option need show, directly written or not; ZFS only compares the size with the free space.
"""

from __future__ import annotations

import enum
import fcntl
import os
import struct

from fastserial.files.linux import is_compressed, mounted_as
from fastserial.interrupts import Descriptors

__all__ = ["Compression", "compression_of"]

_UNKNOWN = ("zfs", "bcachefs")
_FS_IOC_GETFLAGS = 0x80086601 if struct.calcsize("P") == 8 else 0x80046601
_FS_NOCOMP_FL = 0x400  # chattr +m
_FS_NOCOW_FL = 0x800000  # chattr +C: overwritten in place, thus never compressed
_OVERLAYS = 4  # how many overlays may be stacked


class Compression(enum.Enum):
    """How the bytes have to come to be compressed."""

    THROUGH_CACHE = enum.auto()
    ANYHOW = enum.auto()


def compression_of(fd: int) -> Compression | None:
    """Return how an open file is compressed, None if it is not, or that is unknown."""
    if is_compressed(fd):
        return Compression.THROUGH_CACHE
    if os.major(os.fstat(fd).st_dev):  # a block device; those below have none
        return None
    try:
        return _of_mount(fd, _OVERLAYS)
    except (OSError, ValueError):  # no /proc
        return None


def _of_mount(fd: int, overlays: int) -> Compression | None:
    kind, options = mounted_as(fd)
    if kind in _UNKNOWN:
        return Compression.ANYHOW
    if kind == "overlay" and overlays:
        with Descriptors() as files:
            upper = files.open(options.get("upperdir", ""), os.O_PATH | os.O_DIRECTORY)
            return _of_mount(upper, overlays - 1)
    if kind != "btrfs":
        return None
    if options.get("compress-force", "none") != "none":
        wins = _FS_NOCOW_FL
    elif options.get("compress", "none") != "none":
        wins = _FS_NOCOW_FL | _FS_NOCOMP_FL
    else:
        return None
    return None if _flags(fd) & wins else Compression.THROUGH_CACHE


def _flags(fd: int) -> int:
    """Return the flags of a file (`lsattr`); 0 for what cannot be asked, as an upper directory."""
    try:
        found = fcntl.ioctl(fd, _FS_IOC_GETFLAGS, bytes(8))
    except OSError:
        return 0
    return int.from_bytes(found[:4], "little")
