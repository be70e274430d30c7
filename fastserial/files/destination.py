"""Where the bytes of a save go: decided, opened, and explained if it fails.

There are two destinations: a new file that takes the place of what is at a path, and a plain file
object of the caller's. All else is torch's own to write.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Any, TypeVar

from fastserial import trace
from fastserial.errors import REMEDIES, WriteError, write_error
from fastserial.files import linux
from fastserial.files.attributes import CannotKeep
from fastserial.files.replacement import CannotReplace, Replacement
from fastserial.files.targets import (
    FileTarget,
    PathTarget,
    StockWay,
    Target,
    file_target,
    path_target,
)
from fastserial.reasons import Reason

__all__ = ["CallersFile", "Destination", "open_destination", "open_path", "required", "save_error"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def open_destination(
    given: Any, durable: bool, replace_link: bool = False
) -> Destination | StockWay:
    """Open what is to be written, or say why only torch may write it.

        found = open_destination("model.pt", durable=True)
        if isinstance(found, StockWay):
            raise ValueError(found.reason)  # such as "the file is a mount point"

    At the target nothing changes before `commit`; who does not get so far calls `discard`.

    Args:
        given: a path or a file object, as for `torch.save`.
        durable, replace_link: as for `open_path`.

    Raises:
        WriteError: nothing can be written there, by torch neither.
    """
    if isinstance(given, str | os.PathLike):
        return open_path(given, durable, replace_link)
    target = file_target(given)
    return target if isinstance(target, StockWay) else CallersFile(target)


@trace.traced("open target")
def open_path(
    path: str | os.PathLike[str],
    durable: bool,
    replace_link: bool = False,
    named: bool = False,
) -> Replacement | StockWay:
    """Make a new file for a path, or say why only torch may write there.

    Args:
        path: of the file that is made or replaced.
        durable: sync the new file and its directory.
        replace_link: a symbolic link at the path is replaced, not the file that it leads to.
        named: make the file under a temporary name, by which other processes can open it.

    Raises:
        WriteError: nothing can be written there, by torch neither.
    """
    target = path_target(os.fspath(path), replace_link)
    if isinstance(target, StockWay):
        return target
    try:
        return Replacement(target, durable, named)
    except (CannotReplace, CannotKeep) as why:
        reason = why.reason
    except OSError as error:
        directory = os.path.dirname(target.path) or os.curdir
        full = error.errno == errno.ENOSPC and linux.is_out_of_inodes(directory)
        if target.there is None or not full:
            raise save_error(error, target, None, None) from error
        reason = Reason("no inode is free for a new file", "remove files that nobody needs")
    if os.path.islink(target.path):  # torch would write the file that it leads to
        remedy = f" ({reason.remedy})" if reason.remedy else ""
        text = f"The link cannot be replaced: {reason}{remedy}; the previous file is intact"
        raise write_error(errno.EPERM, target.name, text)
    return StockWay(reason)


_Opened = TypeVar("_Opened", bound="Destination")


def required(found: _Opened | StockWay, given: Any) -> _Opened:
    """Return a destination, for those who have no other code to write it.

    Args:
        found: what `open_destination` or `open_path` returned,
        given: for this.

    Raises:
        WriteError: only torch may write it.
    """
    if not isinstance(found, StockWay):
        return found
    name = os.fsdecode(given) if isinstance(given, str | os.PathLike) else repr(given)
    remedy = f" ({found.reason.remedy})" if found.reason.remedy else ""
    text = (
        f"fastserial cannot write this: {found.reason}{remedy}. Save to another path; torch.save "
        "itself can write here"
    )
    raise write_error(errno.EINVAL, name, text)


class CallersFile:
    """A file object of the caller's, written from its position on; it is neither synced nor closed.

    After an error it has the size that it had.
    """

    durable = False
    fallback = None
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


Destination = Replacement | CallersFile
"""Where the bytes of a save go.

Attributes of both:
    target: what was asked for.
    fd: descriptor of the file.
    start: place in the file of the first byte (bytes).
    durable: after `sync`: what was written is on the device.
    fallback: what the file system could not do, or None.
    shared: others know the file, and may hold a `lockf` lock on it.
    outcome: what an error has left at the target, for its text.

`begin` comes before the first byte, `sync` and `commit` after the last one; `discard` takes back
what can be taken back, and does nothing after `commit`.
"""


def save_error(
    error: OSError,
    target: Target,
    destination: Destination | None,
    needed: int | None,
) -> WriteError:
    """Return what a failed system call means for a save: what is left there, and what to do.

    Args:
        error: of the system call.
        target: what is saved to.
        destination: where it goes, None if that could not be opened.
        needed: bytes of the whole save, None if that is not known.
    """
    number = error.errno or errno.EIO
    text = error.strerror or str(error)
    free = None
    if number not in _FULL:
        needed = None
    else:
        free = _free_bytes(target)
        if needed is not None:
            text += f" (the save needs {needed} bytes"
            text += f", {free} are free)" if free is not None else ")"
    if number == errno.ENOENT and isinstance(target, PathTarget) and destination is not None:
        text = "the directory was removed during the save"
    if destination is not None:
        outcome = destination.outcome
    else:
        is_new = isinstance(target, PathTarget) and target.there is None
        outcome = "no file was made" if is_new else "the previous file is intact"
    text += f"; {outcome}"
    if number in REMEDIES:
        text += f". {REMEDIES[number]}"
    found = write_error(number, target.name, text)
    found.bytes_needed, found.bytes_free = needed, free
    return found


def _free_bytes(target: Target) -> int | None:
    """Return the bytes free where the target lies, None if that is no longer known."""
    with contextlib.suppress(OSError):
        if isinstance(target, PathTarget):
            return linux.free_bytes(os.path.dirname(target.path) or os.curdir)
        return linux.free_bytes(target.fd)
    return None
