"""Whether a file system compresses a file: then space cannot be reserved ahead for it.

Facts used: btrfs compresses neither what is written directly nor what was reserved before
(`fallocate`), and reserves the full size. ZFS and bcachefs compress by settings that no mount
option need show, whichever way the bytes come; ZFS only compares the size with the free space.
"""

from __future__ import annotations

import enum
import fcntl
import os
import struct

from fastserial.files import linux
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
    ANY_WAY = enum.auto()


def compression_of(fd: int) -> Compression | None:
    """Return how an open file is compressed, None if it is not, or that is unknown."""
    if linux.is_compressed(fd):
        return Compression.THROUGH_CACHE
    if os.major(os.fstat(fd).st_dev):  # a block device; those below have none
        return None
    try:
        return _of_mount(fd, _OVERLAYS)
    except (OSError, ValueError):  # no /proc
        return None


def _of_mount(fd: int, overlays: int) -> Compression | None:
    kind, options = _mount_of(fd)
    if kind in _UNKNOWN:
        return Compression.ANY_WAY
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


def _mount_of(fd: int) -> tuple[str, dict[str, str]]:
    """Return the type of the file system that an open file lies on, and its mount options."""
    with open(f"/proc/self/fdinfo/{fd}", encoding="utf-8") as file:
        fields = dict(line.split(":", 1) for line in file)
    number = fields.get("mnt_id", "").strip()
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            before, _, after = line.partition(" - ")
            if before.split(" ", 1)[0] == number:
                kind, _, options = after.split()
                pairs = (option.partition("=") for option in options.split(","))
                return kind, {name: value for name, _, value in pairs}
    return "", {}


def _flags(fd: int) -> int:
    """Return the flags of a file (`lsattr`); 0 for what cannot be asked, as an upper directory."""
    try:
        found = fcntl.ioctl(fd, _FS_IOC_GETFLAGS, bytes(8))
    except OSError:
        return 0
    return int.from_bytes(found[:4], "little")
