"""A FUSE file system that shows a folder, with faults: `python mirror.py FOLDER WHERE [OPTIONS]`.

--no-direct        opening with O_DIRECT fails with EINVAL
--failing          calls fail as FOLDER.fails says: `write ESTALE 2`, the next two writes do
--volatile         a device with a write cache: files read back what was written, but only what was
                   synced is on the medium. Writing the name of a file into `/.cut` makes a copy
                   of the medium there, with a random part of the cache: a power cut
--recording       writes and syncs go to the file `FOLDER.log`, and what is written into `/.mark`

As an object store's:

--sequential       a file is written from its first byte to its last, after an `open` that made or
                   emptied it; what was refused makes no file. There is no rename, and a sync ends
                   the file
--no-rename        there is no rename
--no-replace       a rename over an existing file fails
--no-sync          files cannot be synced
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import shutil
import struct
import subprocess
import threading
from pathlib import Path
from typing import Any

from fuse import FUSE, FuseOSError, Operations

_SECTOR = 512
_CUT = "/.cut"
_MARK = "/.mark"
RECORD = struct.Struct("<cQI")  # of a log: write, flush (sync) or mark; offset, number of bytes


class Mirror(Operations):  # type: ignore[misc]
    """Passes every call on to the folder below."""

    def __init__(self, folder: str, options: argparse.Namespace) -> None:
        self.folder = folder
        self.options = options
        self._once = threading.Lock()

    def __call__(self, op: str, *arguments: Any) -> Any:
        if self.options.failing:
            self._fail(op)
        return super().__call__(op, *arguments)

    def _fail(self, op: str) -> None:
        """Raise what the file of failures says of this call, once less than before."""
        file = Path(f"{self.folder}.fails")
        with self._once:
            call, name, count = file.read_text().split()
            if call == op and int(count):
                file.write_text(f"{call} {name} {int(count) - 1}")
                raise FuseOSError(getattr(errno, name))

    def _below(self, path: str) -> str:
        return self.folder + path

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._below(path))
        names = ["mode", "ino", "nlink", "uid", "gid", "size", "atime", "mtime", "ctime"]
        return {f"st_{name}": getattr(found, f"st_{name}") for name in names}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._below(path))]

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._below(path))
        names = "bavail bfree blocks bsize favail ffree files flag frsize namemax".split()
        return {f"f_{name}": getattr(found, f"f_{name}") for name in names}

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_DIRECT and self.options.no_direct:
            raise FuseOSError(errno.EINVAL)
        return os.open(self._below(path), flags & ~os.O_DIRECT)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._below(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._below(path), length)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        os.fsync(fh)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._below(path), mode)

    def chown(self, path: str, uid: int, gid: int) -> None:
        os.chown(self._below(path), uid, gid)

    def link(self, target: str, source: str) -> None:
        os.link(self._below(source), self._below(target))

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._below(path), mode)

    def rename(self, old: str, new: str) -> None:
        os.rename(self._below(old), self._below(new))

    def unlink(self, path: str) -> None:
        os.unlink(self._below(path))


class Volatile(Mirror):
    """One file that is a disk with a write cache; see the text at the top."""

    def __init__(self, folder: str, options: argparse.Namespace) -> None:
        super().__init__(folder, options)
        self._lock = threading.Lock()
        self._cache: list[tuple[int, bytes]] = []
        self._dice = random.Random(1)
        (image,) = Path(folder).iterdir()
        self._medium = image.with_suffix(".medium")
        subprocess.run(["cp", "--sparse=always", image, self._medium], check=True)
        self._fd = os.open(self._medium, os.O_RDWR)
        Path(folder + _CUT).touch()

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        if path == _CUT:
            self._cut(data.decode())
            return len(data)
        with self._lock:
            self._cache.append((offset, data))
            return os.pwrite(fh, data, offset)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        if path == _CUT:
            return
        with self._lock:
            for offset, data in self._cache:
                os.pwrite(self._fd, data, offset)
            self._cache.clear()

    def _cut(self, name: str) -> None:
        with self._lock:
            shutil.copyfile("/dev/null", name)
            subprocess.run(["cp", "--sparse=always", self._medium, name], check=True)
            share = self._dice.choice([0.0, 0.1, 0.5, 0.9, 1.0])
            with open(name, "r+b", buffering=0) as copy:
                for offset, data in self._cache:
                    for at in range(0, len(data), _SECTOR):
                        # Whole writes and single sectors get lost.
                        if at % (64 * _SECTOR) == 0:
                            kept = self._dice.random() < share
                        if kept:
                            os.pwrite(copy.fileno(), data[at : at + _SECTOR], offset + at)


class Recording(Mirror):
    """Keeps a log of what a disk is told; `disk_states.read_log` reads it."""

    def __init__(self, folder: str, options: argparse.Namespace) -> None:
        super().__init__(folder, options)
        self._lock = threading.Lock()
        self._log = open(folder + ".log", "wb", buffering=0)  # noqa: SIM115
        Path(folder + _MARK).touch()

    def _note(self, kind: bytes, offset: int, data: bytes) -> None:
        self._log.write(RECORD.pack(kind, offset, len(data)) + data)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        with self._lock:
            if path == _MARK:
                self._note(b"M", 0, data)
                return len(data)
            self._note(b"W", offset, data)
            return os.pwrite(fh, data, offset)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        with self._lock:
            if path != _MARK:
                self._note(b"F", 0, b"")


class Store(Mirror):
    """As an object store: refuses what the options say."""

    def __init__(self, folder: str, options: argparse.Namespace) -> None:
        super().__init__(folder, options)
        self._at: dict[int, int] = {}  # by handle: how far it was written; -1: no more

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


_SWITCHES = ("no-direct", "failing", "volatile", "recording")
_OF_STORES = ("sequential", "no-rename", "no-replace", "no-sync")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("where")
    for name in (*_SWITCHES, *_OF_STORES):
        parser.add_argument(f"--{name}", action="store_true")
    options = parser.parse_args()
    given = (getattr(options, name.replace("-", "_")) for name in _OF_STORES)
    kind = Store if any(given) else Mirror
    if options.volatile or options.recording:
        kind = Volatile if options.volatile else Recording
    # a file that a store empties is told of with its `open`
    more = {"atomic_o_trunc": True} if kind is Store else {}
    FUSE(
        kind(options.folder, options),
        options.where,
        foreground=True,
        allow_other=False,
        big_writes=True,
        max_write=131072,
        fsname="mirror",
        **more,
    )


if __name__ == "__main__":
    main()
