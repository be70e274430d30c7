"""The file that all ranks write: made by rank 0 in the target's folder, opened by the others."""

from __future__ import annotations

import errno
import os
from typing import NamedTuple

from fastserial.config import Config
from fastserial.errors import WriteError, write_error
from fastserial.files.destination import open_path, required, save_error, wait_until_free
from fastserial.files.linux import reserve, synced
from fastserial.interrupts import Descriptors, ours, suppress


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
    """The file of rank 0.

    Attributes:
        file: it replaces the target at `commit`.
    """

    def __init__(self, path: str, config: Config) -> None:
        """Create it, empty, under a temporary name.

        Raises:
            WriteError: nothing can be written there, or no new file can take the target's place.
        """
        self._config = config
        self._needed = 0
        self.file = required(open_path(path, config.durable, named=True), path)

    def resize(self, nbytes: int) -> FileIdentity:
        """Give the file its size, and return where the other ranks find it.

        Raises:
            WriteError: the size is above a limit.
        """
        self._needed = nbytes
        try:
            os.ftruncate(self.file.fd, nbytes)
        except ours(OSError) as error:
            raise self.explained(error) from error
        path = os.path.join(self.file.target.where, self.file.named or "")
        return FileIdentity(path, os.fstat(self.file.fd).st_ino, nbytes)

    def reserve(self) -> None:
        """Reserve space for all of the file.

        Raises:
            WriteError: there is no space.
        """
        wait_until_free()
        try:
            reserve(self.file.fd, 0, self._needed, self._config)
        except ours(OSError) as error:
            raise self.explained(error) from error

    def explained(self, error: OSError) -> WriteError:
        """Return a failed system call as an error that names the path and the remedy."""
        return save_error(error, self.file, self._needed)


class OpenedFile:
    """Another rank's: the file that rank 0 made."""

    def __init__(self, identity: FileIdentity) -> None:
        """Open it.

        Raises:
            WriteError: it is not there, or another one is: this rank sees another file system.
        """
        self._identity = identity
        self._files = Descriptors()
        try:
            self.fd = self._files.open(identity.path, os.O_RDWR | os.O_NOFOLLOW)
            found = os.fstat(self.fd)
        except ours(OSError) as error:
            self.close()
            number = error.errno or errno.EIO
            raise write_error(number, identity.path, _not_shared(error.strerror or "")) from error
        if (found.st_ino, found.st_size) != (identity.inode, identity.nbytes):
            self.close()
            raise write_error(errno.ESTALE, identity.path, _not_shared("another file is there"))

    def sync(self) -> None:
        """Put what this rank wrote on the device, as far as the file system can.

        Raises:
            OSError: the device failed.
        """
        synced(self.fd)

    def close(self) -> None:
        """Close it. Idempotent."""
        self._files.close()

    def remove(self) -> None:
        """Remove the new file, if rank 0 could not: it is no other than the one it made."""
        with suppress(OSError):
            if os.lstat(self._identity.path).st_ino == self._identity.inode:
                os.unlink(self._identity.path)


def _not_shared(reason: str) -> str:
    return (
        f"this rank cannot open the file that rank 0 made ({reason}); all ranks have to see one "
        "file system there. Save to a shared one, or save with torch.distributed.checkpoint"
    )
