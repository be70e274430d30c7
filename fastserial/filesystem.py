"""The few Linux calls Python has no function for, and what a file system takes.

Facts used: `statx(STATX_DIOALIGN)` (Linux 6.1) tells the alignment direct I/O needs;
`fallocate(2)` fails where the file system cannot reserve space, unlike `posix_fallocate`, which
then writes zeros to every block.
"""

from __future__ import annotations

import ctypes
import errno
import os
from dataclasses import dataclass

__all__ = [
    "DirectAlignment",
    "direct_alignment",
    "free_bytes",
    "kind_of",
    "preallocate",
    "reopen",
]

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_BYTES = 256
_MASK_AT, _MEMORY_AT, _OFFSET_AT = 0, 152, 156
DEFAULT_ALIGNMENT = 4096

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class DirectAlignment:
    """What direct I/O on a file needs (bytes); `told` says if the kernel told or we assume."""

    memory: int
    offset: int
    told: bool


def direct_alignment(fd: int) -> DirectAlignment | None:
    """Return the alignment direct I/O needs on an open file; None: the kernel says it has none."""
    statx = getattr(_libc, "statx", None)
    if statx is not None:
        buffer = (ctypes.c_char * _STATX_BYTES)()
        if statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer) == 0:
            raw = bytes(buffer)

            def field(at: int) -> int:
                return int.from_bytes(raw[at : at + 4], "little")

            if field(_MASK_AT) & _STATX_DIOALIGN:
                memory, offset = field(_MEMORY_AT), field(_OFFSET_AT)
                return DirectAlignment(memory, offset, True) if offset else None
    return DirectAlignment(DEFAULT_ALIGNMENT, DEFAULT_ALIGNMENT, False)


def reopen(fd: int, flags: int) -> int:
    """Open the file behind a descriptor anew, with other flags.

    Raises:
        OSError: the file system does not take the flags, or /proc is not mounted.
    """
    return os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC)


def preallocate(fd: int, offset: int, length: int) -> bool:
    """Reserve space for `length` bytes at `offset`; the file grows to hold them.

    Returns False where the file system cannot.

    Raises:
        OSError: there is not enough space (ENOSPC, EDQUOT, EFBIG), or the disk failed.
    """
    call = _libc.fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    while call(fd, 0, offset, length) != 0:
        number = ctypes.get_errno()
        if number == errno.EINTR:
            continue
        if number in (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV):
            return False
        raise OSError(number, os.strerror(number))
    return True


def free_bytes(fd: int) -> int:
    """Return the bytes an unprivileged user can still write to the file system of `fd`."""
    stats = os.fstatvfs(fd)
    return stats.f_bavail * stats.f_frsize


def kind_of(path: str) -> str:
    """Return the type of the file system that holds `path`, such as `ext4`, or `unknown`."""
    real = os.path.realpath(path)
    best, kind = "", "unknown"
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as mounts:
            lines = mounts.read().splitlines()
    except OSError:
        return kind
    for line in lines:
        columns = line.split(" ")
        point = columns[1].replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, columns[2]
    return kind
