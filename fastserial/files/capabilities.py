"""Whether a file system can replace a file as a whole: known from its type, or tried out once.

Object stores and old distributed file systems behind FUSE may have no `rename` over an existing
file, or only take the bytes of a file sequentially. The trial writes out of order first: those
that refuse it make no file of what was refused, which matters where files cannot be removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import NamedTuple

from fastserial.config.performance import PAGE
from fastserial.files import linux

__all__ = ["CAPABLE", "Limit", "limit_of"]

# Types (statfs) that need no trial: ext2 to ext4, XFS, btrfs, tmpfs, overlayfs, F2FS, ZFS,
# bcachefs, ramfs, NFS, Ceph, Lustre, GPFS, BeeGFS.
CAPABLE = frozenset(
    {
        0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x794C7630, 0xF2F52010, 0x2FC12FC1,
        0xCA451A4E, 0x858458F6, 0x6969, 0x00C36400, 0x0BD00BD0, 0x47504653, 0x19830326,
    }
)  # fmt: skip
# These tell of the moment, not of the file system.
_PASSING = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOENT, errno.ENAMETOOLONG,
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.ENOTCONN, errno.EIO,
    errno.ESTALE,
)  # fmt: skip


class Limit(NamedTuple):
    """Why no file can be replaced; `sequential`: and bytes are only taken sequentially."""

    reason: str
    sequential: bool = False


_known: dict[tuple[int, int], Limit | None] = {}


def limit_of(directory: str) -> Limit | None:
    """Return what the file system of a directory lacks, None if it can replace files.

    Tried with two files of a page, once for each mount in a process.

    Raises:
        OSError: it cannot be tried now (no permission, no space, ...).
    """
    key = (os.stat(directory).st_dev, linux.mount_of(directory))
    if key not in _known:
        _known[key] = _tried(directory)
    return _known[key]


def _tried(directory: str) -> Limit | None:
    """Write two files and rename one over the other.

    Raises:
        OSError: something else is wrong, and nothing was learnt.
    """
    stem = os.path.join(directory, f".fastserial-trial-{os.getpid()}-{os.urandom(4).hex()}")
    first, second = f"{stem}-1.tmp", f"{stem}-2.tmp"
    limit = Limit("the file system only takes the bytes of a file sequentially", True)
    try:
        _write(first, (PAGE, 0))
        limit = Limit("the file system cannot rename a file over another")
        _write(second, (0,))
        os.rename(second, first)
    except OSError as error:
        if error.errno in _PASSING:
            raise
        return limit
    finally:
        for path in (first, second):
            with contextlib.suppress(OSError):
                os.unlink(path)
    return None


def _write(path: str, offsets: tuple[int, ...]) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, fd)
        try:
            for offset in offsets:
                os.pwrite(fd, bytes(PAGE), offset)
        except OSError:
            stack.pop_all()
            with contextlib.suppress(OSError):  # which may fail as well, otherwise
                os.close(fd)
            raise
