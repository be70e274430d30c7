"""Overwriting a file where it is, as torch does, where no new file may take its place.

The old content is gone once the first byte is written, and a crash leaves a part of the new one.
Until the checkpoint is pickled and laid out nothing is touched, so that an object that cannot be
pickled costs nothing; torch truncates the file before that.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import replace

from fastserial import filesystem
from fastserial.commit import CannotReplace, Replacement
from fastserial.config import Config
from fastserial.targets import InPlaceTarget, PathTarget

__all__ = ["InPlaceFile", "open_target"]

_NO_SYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


def open_target(target: PathTarget | InPlaceTarget, durable: bool) -> Replacement | InPlaceFile:
    """Make a new file for a target, or open the one that is there where that cannot be.

    Raises:
        OSError: nothing can be written there.
    """
    if isinstance(target, InPlaceTarget):
        return InPlaceFile(target, durable)
    try:
        return Replacement(target, durable)
    except CannotReplace as found:
        reason, sequential = found.reason, found.sequential
    except OSError as error:
        directory = os.path.dirname(target.path) or os.curdir
        if target.mode is None or error.errno != errno.ENOSPC:
            raise
        if not filesystem.is_out_of_inodes(directory):
            raise
        reason, sequential = "no inode is free for a new file, so the old one is overwritten", False
    return InPlaceFile(InPlaceTarget(target.name, reason, sequential), durable)


class InPlaceFile:
    """An open file that is overwritten: `fd` is its descriptor until `close`.

    Attributes:
        begun: the old content is gone.
        synced: the new content is on the device.
    """

    def __init__(self, target: InPlaceTarget, durable: bool) -> None:
        """Open the file, or create it where there is none.

        Raises:
            OSError: it cannot be opened for writing.
        """
        self.target = target
        self.begun = False
        self.synced = False
        self._durable = durable
        self._is_new = not os.path.exists(target.name)
        if target.sequential:
            # Such a file system wants it emptied by the very `open`: the number is kept till then.
            self.fd = os.eventfd(0, os.EFD_CLOEXEC)
        else:
            self.fd = filesystem.open_own(target.name, os.O_WRONLY | os.O_CREAT)

    def adapted(self, config: Config) -> Config:
        """Return the options that the file system can serve."""
        if not self.target.sequential:
            return config
        return replace(config, direct=False, preallocate=False, tuned=False)

    def begin(self) -> None:
        """Empty the file, right before its first byte is written. Idempotent.

        Raises:
            OSError: it cannot be opened for writing.
        """
        if self.begun:
            return
        if self.target.sequential:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            fd = filesystem.open_own(self.target.name, flags)
            self.begun = True
            try:
                os.dup2(fd, self.fd, inheritable=False)
            finally:
                os.close(fd)
        else:
            self.begun = True
            os.ftruncate(self.fd, 0)

    def sync(self) -> None:
        """Put the new content on the device, if the save is to be durable.

        Raises:
            OSError: the device failed.
        """
        if self._durable:
            try:
                os.fsync(self.fd)
                self.synced = True
            except OSError as error:
                if error.errno not in _NO_SYNC:
                    raise

    def commit(self) -> None:
        """Close the file.

        Raises:
            OSError: a network file system reports a late error.
        """
        fd, self.fd = self.fd, -1
        os.close(fd)

    def discard(self) -> None:
        """Close the file as it is; one that was not there before is removed. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd < 0:
            return
        with contextlib.suppress(OSError):
            if self._is_new and os.path.samestat(os.fstat(fd), os.stat(self.target.name)):
                os.unlink(self.target.name)
        with contextlib.suppress(OSError):
            os.close(fd)
