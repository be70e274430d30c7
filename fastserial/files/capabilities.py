"""Whether a file system can replace a file: known from its type, or tried out once per mount.

Object stores and old distributed file systems behind FUSE may have no `rename` over an existing
file, or only take the bytes of a file sequentially. An error of the rename itself would come too
late: by then torch has pickled, and cannot be asked to write the file.
"""

from __future__ import annotations

import contextlib
import errno
import os

from fastserial.config.performance import PAGE
from fastserial.files import linux
from fastserial.interrupts import Descriptors
from fastserial.reasons import RENAMES, Reason

__all__ = ["why_incapable"]

# Types (statfs) that need no trial: ext2 to ext4, XFS, btrfs, tmpfs, overlayfs, F2FS, ZFS,
# bcachefs, ramfs, NFS, Ceph, Lustre, GPFS, BeeGFS.
_CAPABLE = frozenset(
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
_known: dict[tuple[int, int], Reason | None] = {}  # by device and mount


def why_incapable(directory: str, magic: int) -> Reason | None:
    """Return why no file can be replaced in a directory; None if one can, or if that is not known.

    Where the type does not tell, it is tried with two small files, once for each mount in a
    process.

    Args:
        magic: the type of its file system (`linux.magic_of`).
    """
    if magic in _CAPABLE:
        return None
    try:
        key = (os.stat(directory).st_dev, linux.mount_of(directory))
        if key not in _known:
            _known[key] = _tried(directory)
        return _known[key]
    except OSError:  # it cannot be tried now: the save finds out
        return None


def _tried(directory: str) -> Reason | None:
    """Write two files and rename one over the other.

    Raises:
        OSError: something else is wrong, and nothing was learnt.
    """
    stem = os.path.join(directory, f".fastserial-trial-{os.getpid()}-{os.urandom(4).hex()}")
    first, second = f"{stem}-1.tmp", f"{stem}-2.tmp"
    reason = Reason("the file system only takes the bytes of a file sequentially", RENAMES)
    try:
        _write_backwards(first)
        reason = Reason("the file system cannot rename a file over another", RENAMES)
        _write_backwards(second)
        os.rename(second, first)
    except OSError as error:
        if error.errno in _PASSING:
            raise
        return reason
    finally:
        for path in (first, second):
            with contextlib.suppress(OSError):
                os.unlink(path)
    return None


def _write_backwards(path: str) -> None:
    """Make a file of two pages, the last one first.

    Where that is refused no file is made, which matters where none can be removed.

    Raises:
        OSError: it is refused.
    """
    with Descriptors() as files:
        fd = files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        for offset in (PAGE, 0):
            os.pwrite(fd, bytes(PAGE), offset)
        files.close_newest()
