"""The file that all ranks write: made by rank 0 beside the target, opened by the others."""

from __future__ import annotations

import contextlib
import errno
import os
from typing import NamedTuple

from fastserial.config import Config
from fastserial.errors import WriteError, write_error
from fastserial.files.destination import open_path, required, save_error
from fastserial.files.linux import reserve
from fastserial.interrupts import Descriptors

__all__ = ["FileIdentity", "NewFile", "OpenedFile"]


class FileIdentity(NamedTuple):
    """By which the other ranks find the new file.

    Attributes:
        path: absolute.
        inode, nbytes: what they have to find there.
    """

    path: str
    inode: int
    nbytes: int


class NewFile:
    """Rank 0's: a file that takes the target's place at `commit`; `fd` is its descriptor."""

    def __init__(self, path: str, config: Config) -> None:
        """Create it, empty, under a temporary name.

        Raises:
            WriteError: nothing can be written there, or no new file can take the target's place.
        """
        self._config = config
        self._needed = 0
        self._file = required(open_path(path, config.durable, named=True), path)

    @property
    def fd(self) -> int:
        return self._file.fd

    @property
    def durable(self) -> bool:
        return self._file.durable

    @property
    def fallback(self) -> str | None:
        return self._file.fallback

    def place(self, nbytes: int) -> FileIdentity:
        """Give the file its size, and return where the other ranks find it.

        Raises:
            OSError: there is no space.
        """
        self._needed = nbytes
        self._file.begin()
        reserve(self.fd, 0, nbytes, self._config)
        os.ftruncate(self.fd, nbytes)
        directory = os.path.dirname(os.path.abspath(self._file.target.path))
        path = os.path.join(directory, self._file.named or "")
        return FileIdentity(path, os.fstat(self.fd).st_ino, nbytes)

    def sync(self) -> None:
        self._file.sync()

    def commit(self) -> None:
        """Make it the target.

        Raises:
            OSError: the target is the old file still.
        """
        self._file.commit()

    def discard(self) -> None:
        """Remove it. Idempotent; does nothing after `commit`."""
        self._file.discard()

    def explained(self, error: OSError) -> WriteError:
        """Return a failed system call as an error that names the path and the remedy."""
        if isinstance(error, WriteError):
            return error
        return save_error(error, self._file, self._needed)


class OpenedFile:
    """Another rank's: the file that rank 0 made."""

    def __init__(self, place: FileIdentity) -> None:
        """Open it.

        Raises:
            WriteError: it is not there, or another one is: this rank sees another file system.
        """
        self._place = place
        self._files = Descriptors()
        try:
            self.fd = self._files.open(place.path, os.O_RDWR | os.O_NOFOLLOW)
            found = os.fstat(self.fd)
        except OSError as error:
            self.close()
            number = error.errno or errno.EIO
            raise write_error(number, place.path, _not_shared(error.strerror or "")) from error
        if (found.st_ino, found.st_size) != (place.inode, place.nbytes):
            self.close()
            raise write_error(errno.ESTALE, place.path, _not_shared("another file is there"))

    def sync(self) -> None:
        os.fsync(self.fd)

    def close(self) -> None:
        """Close it. Idempotent."""
        self._files.close()

    def remove(self) -> None:
        """Remove the new file, if rank 0 could not: it is no other than the one it made."""
        with contextlib.suppress(OSError):
            if os.lstat(self._place.path).st_ino == self._place.inode:
                os.unlink(self._place.path)


def _not_shared(reason: str) -> str:
    return (
        f"this rank cannot open the file that rank 0 made ({reason}); all ranks have to see one "
        "file system there. Save to a shared one, or save with torch.distributed.checkpoint"
    )
