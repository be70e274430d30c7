"""Overwriting a file where it is, as torch does, where no new file may take its place.

The old content is gone once the first byte is written, and a crash leaves a part of the new one.
Until the checkpoint is pickled and laid out nothing is touched, so that an object that cannot be
pickled costs nothing; torch truncates the file before that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from dataclasses import replace

from fastserial.config import Config
from fastserial.targets import InPlaceTarget

__all__ = ["InPlaceFile"]

_NO_SYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


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
        self.fd = os.open(target.name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def adapted(self, config: Config) -> Config:
        """Return the options that the file system can serve."""
        if not self.target.sequential:
            return config
        # A file that counts as small is written in one pass, from its first byte to its last.
        return replace(config, small_file=sys.maxsize, direct=False, preallocate=False, tuned=False)

    def begin(self) -> None:
        """Empty the file, right before its first byte is written. Idempotent."""
        if not self.begun:
            self.begun = True
            os.ftruncate(self.fd, 0)

    def commit(self) -> None:
        """Put the new content on the device, if the save is to be durable, and close the file.

        Raises:
            OSError: the device failed, or a network file system reports a late error.
        """
        if self._durable:
            try:
                os.fsync(self.fd)
                self.synced = True
            except OSError as error:
                if error.errno not in _NO_SYNC:
                    raise
        fd, self.fd = self.fd, -1
        os.close(fd)

    def discard(self) -> None:
        """Close the file as it is. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)
