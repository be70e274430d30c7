"""Overwriting a file in place, as torch does, where no new file can replace it.

The old content is gone once the first byte is written, and a crash leaves a part of the new one.
Until the checkpoint is pickled and laid out nothing is touched, so that an object that cannot be
pickled costs nothing; torch truncates the file before that.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Protocol

from fastserial import trace
from fastserial.files import linux
from fastserial.files.replacement import CannotReplace, Replacement
from fastserial.files.targets import FileTarget, InPlaceTarget, Target
from fastserial.interrupts import Descriptors, finish

__all__ = ["CallersFile", "Destination", "InPlaceFile", "open_target"]

_NO_FILE = "no file was made"


class Destination(Protocol):
    """Where the bytes of a save go.

    Attributes:
        target: what was asked for.
        fd: descriptor of the file.
        start: place in the file of the first byte (bytes).
        durable: after `sync`: what was written is on the device.
        fallback: why it is not done the best way, or None.
        sequential: the file only takes its bytes sequentially.
        shared: others know the file, and may hold a `lockf` lock on it.
    """

    @property
    def target(self) -> Target: ...
    @property
    def fd(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def durable(self) -> bool: ...
    @property
    def fallback(self) -> str | None: ...
    @property
    def sequential(self) -> bool: ...
    @property
    def shared(self) -> bool: ...
    @property
    def outcome(self) -> str:
        """What an error has left at the target, for its text."""

    def begin(self) -> None:
        """Get ready for the first byte. Idempotent."""

    def sync(self) -> None:
        """Put what was written on the device, if the save is to be durable."""

    def commit(self) -> None:
        """Make what was written the file."""

    def discard(self) -> None:
        """Take back what can be taken back. Idempotent; nothing after `commit`."""


@trace.traced("open target")
def open_target(target: Target, durable: bool) -> Destination:
    """Make a new file for a target, or open the one that is there where that cannot be.

    Raises:
        OSError: nothing can be written there.
    """
    if isinstance(target, FileTarget):
        return CallersFile(target)
    if isinstance(target, InPlaceTarget):
        return InPlaceFile(target, durable)
    try:
        return Replacement(target, durable)
    except CannotReplace as found:
        reason, sequential = found.reason, found.sequential
    except OSError as error:
        directory = os.path.dirname(target.path) or os.curdir
        if target.mode is None or error.errno != errno.ENOSPC or os.path.islink(target.path):
            raise
        if not linux.is_out_of_inodes(directory):
            raise
        reason, sequential = "no inode is free for a new file, so the old one is overwritten", False
    if os.path.islink(target.path):  # to be replaced; the file it leads to is not ours to overwrite
        raise OSError(errno.EPERM, f"The link cannot be replaced: {reason}")
    return InPlaceFile(InPlaceTarget(target.name, reason, sequential), durable)


class InPlaceFile:
    """An open file that is overwritten: `fd` is its descriptor until `close`.

    Attributes:
        begun: the old content is gone.
        durable: the new content is on the device.
    """

    start = 0
    shared = False

    def __init__(self, target: InPlaceTarget, durable: bool) -> None:
        """Open the file, or create it where there is none.

        Raises:
            OSError: it cannot be opened for writing.
        """
        self.target = target
        self.begun = False
        self.durable = False
        self._wanted_durable = durable
        self._is_new = not os.path.exists(target.name)
        self._files = Descriptors()
        if target.sequential:
            # Such a file system wants it emptied by the very `open`: the number is kept till then.
            self.fd = self._files.reserve()
        else:
            self.fd = self._files.open(target.name, os.O_WRONLY | os.O_CREAT)

    @property
    def fallback(self) -> str:
        """Why the file was not replaced."""
        return self.target.reason

    @property
    def sequential(self) -> bool:
        """Whether the file system takes bytes in the order of the file only."""
        return self.target.sequential

    @property
    def outcome(self) -> str:
        """What an error has left at the path."""
        if self._is_new:
            return "the save is incomplete" if os.path.exists(self.target.name) else _NO_FILE
        return "the save is incomplete" if self.begun else "the previous file is intact"

    def begin(self) -> None:
        """Empty the file, right before its first byte is written. Idempotent.

        Raises:
            OSError: it cannot be opened for writing.
        """
        if self.begun:
            return
        if self.target.sequential:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            fd = self._files.open(self.target.name, flags)
            self.begun = True
            os.dup2(fd, self.fd, inheritable=False)
            self._files.close(but=1)
        else:
            self.begun = True
            os.ftruncate(self.fd, 0)

    @trace.traced("fsync")
    def sync(self) -> None:
        """Put the new content on the device, if the save is to be durable.

        Raises:
            OSError: the device failed.
        """
        if self._wanted_durable:
            self.durable = linux.synced(self.fd)

    def commit(self) -> None:
        """Close the file.

        Raises:
            OSError: a network file system reports a late error.
        """
        self._files.close_newest()
        self.fd = -1

    def discard(self) -> None:
        """Close the file as it is; one that was not there before is removed. Idempotent."""
        finish(self._remove, self._close)

    def _remove(self) -> None:
        fd = self._files.newest
        with contextlib.suppress(OSError):
            if self._is_new and os.path.samestat(os.fstat(fd), os.stat(self.target.name)):
                os.unlink(self.target.name)

    def _close(self) -> None:
        self.fd = -1
        self._files.close()


class CallersFile:
    """A file object of the caller's, written from its position on; it is neither synced nor closed.

    After an error it has the size that it had.
    """

    durable = False
    fallback = None
    sequential = False
    shared = True
    outcome = "the save is incomplete"

    def __init__(self, target: FileTarget) -> None:
        self.target = target
        self.fd = target.fd
        self.start = target.offset
        self._size_before: int | None = None

    def begin(self) -> None:
        """Note the size of the file. Idempotent."""
        if self._size_before is None:
            self._size_before = os.fstat(self.fd).st_size

    def sync(self) -> None:
        """Do nothing: when it is synced is the caller's to say."""

    def commit(self) -> None:
        """Do nothing: the bytes are in the file."""
        self._size_before = None

    def discard(self) -> None:
        """Give the file the size that it had, so that reserved space is given back."""
        size, self._size_before = self._size_before, None
        if size is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self.fd, size)
