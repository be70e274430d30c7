"""Whether a file system compresses a file: then its space cannot be reserved ahead.

Facts used: btrfs compresses neither what is written directly nor what was reserved before
(`fallocate`), and reserves the full size. ZFS and bcachefs compress by settings that no mount
option need show.
"""

from __future__ import annotations

import fcntl
import os
import struct

from fastserial.config import Config
from fastserial.files import linux

__all__ = ["compresses", "reserve"]

_FS_IOC_GETFLAGS = 0x80086601 if struct.calcsize("P") == 8 else 0x80046601
_FS_NOCOW_FL = 0x800000  # chattr +C: overwritten in place, thus never compressed


def reserve(fd: int, offset: int, nbytes: int, config: Config) -> None:
    """Reserve the space of a new file, if options and file system are for it.

    Args:
        fd: of the file.
        offset, nbytes: which bytes are going to be written.
        config: the options.

    Raises:
        OSError: there is not enough space.
    """
    wanted = config.preallocate and nbytes > config.small_file
    if wanted and (config.direct is True or not compresses(fd)):
        linux.preallocate(fd, offset, nbytes)


def compresses(fd: int) -> bool:
    """Return whether an open file is compressed, as far as that is known."""
    if linux.is_compressed(fd):
        return True
    if os.major(os.fstat(fd).st_dev):  # a block device; those below have none
        return False
    try:
        kind, options = linux.mounted_as(fd)
    except (OSError, ValueError):  # no /proc
        return False
    if kind in ("zfs", "bcachefs"):
        return True
    given = {options.get("compress", "none"), options.get("compress-force", "none")}
    return kind == "btrfs" and given != {"none"} and not _is_overwritten_in_place(fd)


def _is_overwritten_in_place(fd: int) -> bool:
    try:
        flags = fcntl.ioctl(fd, _FS_IOC_GETFLAGS, bytes(8))
    except OSError:
        return False
    return bool(int.from_bytes(flags[:4], "little") & _FS_NOCOW_FL)
