"""A FUSE file system like an object store's: `python store.py FOLDER WHERE [OPTIONS]`.

--sequential       a file is written from its first byte to its last, after an `open` that made or
                   emptied it; what was refused makes no file. There is no rename, and a sync ends
                   the file
--no-rename        there is no rename
--no-replace       a rename over an existing file fails
--no-unlink        no file can be removed
--no-sync          files cannot be synced
--no-link-counts   directories have 0 links, as in Hadoop's fuse-dfs
--name-max BYTES   a file's name has at most so many
"""

from __future__ import annotations

import argparse
import errno
import os
from typing import Any

from fuse import FUSE, FuseOSError
from mirror import Mirror


class Store(Mirror):
    """Refuses what the options say, and passes the rest on to the folder below."""

    def __init__(self, folder: str, options: argparse.Namespace) -> None:
        super().__init__(folder, options)
        self._at: dict[int, int] = {}  # by handle: how far it was written; -1: no more

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        if len(os.fsencode(os.path.basename(path))) > self.options.name_max:
            raise FuseOSError(errno.ENAMETOOLONG)
        found = super().getattr(path, fh)
        if self.options.no_link_counts and os.path.isdir(self._below(path)):
            found["st_nlink"] = 0
        return found

    def statfs(self, path: str) -> dict[str, int]:
        return {**super().statfs(path), "f_namemax": self.options.name_max}

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        fh = super().create(path, mode, fi)
        self._at[fh] = 0
        return fh

    def open(self, path: str, flags: int) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        if self.options.sequential and writes and not flags & os.O_TRUNC:
            raise FuseOSError(errno.EPERM)
        fh = super().open(path, flags)
        self._at[fh] = 0
        return fh

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        if self.options.sequential and offset != self._at[fh]:
            self._at[fh] = -1
            raise FuseOSError(errno.EINVAL)
        self._at[fh] += len(data)
        return super().write(path, data, offset, fh)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        if self.options.sequential:
            raise FuseOSError(errno.EPERM)
        super().truncate(path, length, fh)

    def flush(self, path: str, fh: int) -> None:
        if self._at[fh] == -1:
            raise FuseOSError(errno.EIO)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        if self.options.no_sync:
            raise FuseOSError(errno.EOPNOTSUPP)
        if self.options.sequential:
            self._at[fh] = -2
        super().fsync(path, datasync, fh)

    def release(self, path: str, fh: int) -> None:
        if self._at.pop(fh) == -1:
            os.unlink(self._below(path))
        super().release(path, fh)

    def rename(self, old: str, new: str) -> None:
        if self.options.sequential or self.options.no_rename:
            raise FuseOSError(errno.ENOSYS)
        if self.options.no_replace and os.path.exists(self._below(new)):
            raise FuseOSError(errno.EEXIST)
        super().rename(old, new)

    def link(self, target: str, source: str) -> None:
        raise FuseOSError(errno.ENOSYS)

    def chmod(self, path: str, mode: int) -> None:
        if self.options.sequential:
            raise FuseOSError(errno.EPERM)
        super().chmod(path, mode)

    def unlink(self, path: str) -> None:
        if self.options.no_unlink:
            raise FuseOSError(errno.EPERM)
        super().unlink(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("where")
    for name in ("sequential", "no-rename", "no-replace", "no-unlink", "no-sync", "no-link-counts"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--name-max", type=int, default=255)
    parser.set_defaults(no_direct=False, short=0, no_dirsync=False)
    options = parser.parse_args()
    FUSE(
        Store(options.folder, options),
        options.where,
        foreground=True,
        allow_other=False,
        atomic_o_trunc=True,
        big_writes=True,
        max_write=131072,
        fsname="store",
    )


if __name__ == "__main__":
    main()
