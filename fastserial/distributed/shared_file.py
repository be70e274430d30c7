"""The file that all ranks write: made by rank 0 beside the target, opened by the others.

Where no new file can take the target's place it is the target itself, as for one process.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import NamedTuple

from fastserial.config import Config
from fastserial.errors import WriteError, write_error
from fastserial.files import linux
from fastserial.files.in_place import InPlaceFile
from fastserial.files.linux import compression_of
from fastserial.files.replacement import CannotReplace, Replacement
from fastserial.files.targets import InPlaceTarget, PathTarget, Target, writable_target
from fastserial.interrupts import Descriptors
from fastserial.saving.save_errors import save_error

__all__ = ["NewFile", "OpenedFile", "Place"]


class Place(NamedTuple):
    """By which the other ranks find the new file.

    Attributes:
        path: absolute.
        inode, nbytes: what they have to find there.
        in_place: it is the target itself, which has its old content until `NewFile.begin`.
    """

    path: str
    inode: int
    nbytes: int
    in_place: bool


class NewFile:
    """Rank 0's: a file that takes the target's place at `commit`, or is overwritten."""

    def __init__(self, path: str, config: Config) -> None:
        """Create it, empty, under a temporary name; or open the target where that cannot be.

        Raises:
            WriteError: nothing can be written there, or not by several ranks.
        """
        self._target = target = writable_target(path)
        self._config = config
        self._needed = 0
        self._file: Replacement | InPlaceFile | None = None
        try:
            self._file = _opened(target, config.durable)
        except OSError as error:
            raise self.explained(error) from error
        if self._file is None:
            raise _not_for_many(path)

    @property
    def fd(self) -> int:
        return self._file.fd if self._file is not None else -1

    @property
    def durable(self) -> bool:
        return self._file is not None and self._file.durable

    @property
    def fallback(self) -> str | None:
        return self._file.fallback if self._file is not None else None

    def place(self, nbytes: int) -> Place:
        """Return where the other ranks find it. A new file gets its size.

        Raises:
            OSError: there is no space.
        """
        self._needed = nbytes
        if isinstance(self._file, Replacement):
            self._file.begin()
            self._reserve()
            directory = os.path.dirname(os.path.abspath(self._file.target.path))
            path = os.path.join(directory, self._file.named or "")
        else:
            path = os.path.realpath(self._target.name)
        in_place = isinstance(self._file, InPlaceFile)
        return Place(path, os.fstat(self.fd).st_ino, nbytes, in_place)

    def begin(self) -> None:
        """Get ready for the first byte, when no rank has objected: a target loses its content.

        Raises:
            OSError: there is no space.
        """
        if isinstance(self._file, InPlaceFile):
            self._file.begin()
            self._reserve()

    def _reserve(self) -> None:
        """Give the file its size, and the space as far as the options say so."""
        nbytes, config = self._needed, self._config
        if config.preallocate and nbytes > config.small_file and compression_of(self.fd) is None:
            linux.preallocate(self.fd, 0, nbytes)
        os.ftruncate(self.fd, nbytes)

    def sync(self) -> None:
        if self._file is not None:
            self._file.sync()

    def commit(self) -> None:
        """Make it the target.

        Raises:
            OSError: the target is the old file still.
        """
        if self._file is not None:
            self._file.commit()

    def discard(self) -> None:
        """Remove it. Idempotent; does nothing after `commit`."""
        if self._file is not None:
            self._file.discard()

    def explained(self, error: OSError) -> WriteError:
        """Return a failed system call as an error that names the path and the remedy."""
        if isinstance(error, WriteError):
            return error
        return save_error(error, self._target, self._file, self._needed)


class OpenedFile:
    """Another rank's: the file that rank 0 made."""

    def __init__(self, place: Place) -> None:
        """Open it.

        Raises:
            WriteError: it is not there, or another one is: this rank sees another file system.
        """
        self._place = place
        self._files = Descriptors()
        try:
            access = os.O_WRONLY if place.in_place else os.O_RDWR
            self.fd = self._files.open(place.path, access | os.O_NOFOLLOW)
            found = os.fstat(self.fd)
        except OSError as error:
            self.close()
            number = error.errno or errno.EIO
            raise write_error(number, place.path, _not_shared(error.strerror or "")) from error
        nbytes = place.nbytes if place.in_place else found.st_size
        if (found.st_ino, nbytes) != (place.inode, place.nbytes):
            self.close()
            raise write_error(errno.ESTALE, place.path, _not_shared("another file is there"))

    def sync(self) -> None:
        os.fsync(self.fd)

    def close(self) -> None:
        """Close it. Idempotent."""
        self._files.close()

    def remove(self) -> None:
        """Remove the new file, if rank 0 could not: it is no other than the one it made."""
        if self._place.in_place:
            return
        with contextlib.suppress(OSError):
            if os.lstat(self._place.path).st_ino == self._place.inode:
                os.unlink(self._place.path)


def _opened(target: Target, durable: bool) -> Replacement | InPlaceFile | None:
    """Return a new file for a target, or the target; None if many cannot write it.

    Raises:
        OSError: nothing can be written there.
    """
    if isinstance(target, PathTarget):
        try:
            return Replacement(target, durable, named=True)
        except CannotReplace as found:
            target = InPlaceTarget(target.name, found.reason, found.sequential)
    if isinstance(target, InPlaceTarget) and not target.sequential:
        return InPlaceFile(target, durable)
    return None


def _not_for_many(path: str) -> WriteError:
    text = (
        "several ranks cannot write there: the file system takes the bytes of a file only in "
        "their order. Save to another path"
    )
    return write_error(errno.EINVAL, path, text)


def _not_shared(reason: str) -> str:
    return (
        f"this rank cannot open the file that rank 0 made ({reason}); all ranks have to see one "
        "file system there. Save to a shared one, or save with torch.distributed.checkpoint"
    )
