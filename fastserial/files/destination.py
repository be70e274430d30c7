"""Where the bytes of a save go: decided, opened, and explained if it fails.

There are two destinations: a new file that takes the place of what is at a path, and a plain file
object of the caller's. All else is torch's own to write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import stat
from time import perf_counter
from typing import Any, BinaryIO, TypeVar

from fastserial import trace
from fastserial.errors import REMEDIES, WriteError, write_error
from fastserial.files import linux
from fastserial.files.attributes import CannotReplace
from fastserial.files.replacement import Replacement
from fastserial.files.sources import file_name, plain_file
from fastserial.files.targets import PathTarget, StockWay, path_target
from fastserial.reasons import A_FILE, GIVE_A_PATH, Reason

__all__ = ["CallersFile", "Destination", "open_destination", "open_path", "required", "save_error"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_METHODS = frozenset({"write"})  # whoever puts one in its place watches or changes the bytes
_APPENDING = Reason(
    "the file is open for appending", 'open it with "wb", or give torch.save a path'
)


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
    began = perf_counter()
    is_path = isinstance(given, str | os.PathLike)
    found = open_path(given, durable, replace_link) if is_path else _open_file(given)
    if not isinstance(found, StockWay):
        found.began = began
    return found


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
    except CannotReplace as why:
        reason = why.reason
    except OSError as error:
        full = error.errno == errno.ENOSPC and linux.is_out_of_inodes(target.where)
        if target.there is None or not full:
            raise save_error(error, target, None) from error
        reason = Reason("no inode is free for a new file", "remove files that nobody needs")
    if os.path.islink(target.path):  # torch would write the file that it leads to
        text = f"The link cannot be replaced: {reason.with_remedy}; the previous file is intact"
        raise write_error(errno.EPERM, target.name, text)
    return StockWay(reason)


def _open_file(file: Any) -> CallersFile | StockWay:
    """Take a file object: only plain files on a regular file are ours.

    Anything else that has a descriptor (gzip, sockets, wrappers) may not put the bytes it is given
    at the descriptor's position.
    """
    raw = _raw_file(file)
    if raw is None:
        return StockWay(Reason("not a plain file object", GIVE_A_PATH))
    try:
        if raw.closed or not raw.writable():
            return StockWay(Reason("the file is not open for writing", 'open it with "wb"'))
        fd = raw.fileno()
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return StockWay(Reason("not a regular file", A_FILE))
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND:
            return StockWay(_APPENDING)
        raw.flush()
        return CallersFile(raw, fd, raw.tell())
    except (OSError, ValueError) as error:
        return StockWay(Reason(f"the file's position is not known: {error}", GIVE_A_PATH))


def _raw_file(file: Any) -> BinaryIO | None:
    """Return the plain Python file inside a file object, or None if there is none we know."""
    kind = type(file)
    if kind.__module__ == "tempfile" and kind.__name__ == "_TemporaryFileWrapper":
        # The wrapper keeps its own `write` around the file's once it was used.
        written = vars(file).get("write")
        if written is not None and getattr(written, "__wrapped__", None) != file.file.write:
            return None
        return _raw_file(file.file)
    found: BinaryIO | None = plain_file(file, (io.BufferedWriter, io.BufferedRandom), _METHODS)
    return found


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
    text = (
        f"fastserial cannot write this: {found.reason.with_remedy}. Save to another path; "
        "torch.save itself can write here"
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

    def __init__(self, file: BinaryIO, fd: int, start: int) -> None:
        """Take a file, its descriptor and its position (bytes)."""
        self.name = file_name(file, fd)
        self.fd = self.where = fd
        self.start = start
        self.file = file
        self.began = perf_counter()
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
    name: what the caller calls it.
    fd: descriptor of the file.
    where: what is on the same file system: a path or a descriptor.
    start: place in the file of the first byte (bytes).
    began: when it began to be opened (seconds of `perf_counter`).
    durable: after `sync`: what was written is on the device.
    fallback: what the file system could not do, or None.
    shared: others know the file, and may hold a `lockf` lock on it.
    outcome: what an error has left at the target, for its text.

`begin` comes before the first byte, `sync` and `commit` after the last one; `discard` takes back
what can be taken back, and does nothing after `commit`.
"""


def save_error(error: OSError, place: PathTarget | Destination, needed: int | None) -> WriteError:
    """Return what a failed system call means for a save: what is left there, and what to do.

    Args:
        error: of the system call.
        place: where the save goes, or was to go.
        needed: bytes of the whole save, None if that is not known.
    """
    number = error.errno or errno.EIO
    text = error.strerror or str(error)
    free = None
    if number not in _FULL:
        needed = None
    else:
        with contextlib.suppress(OSError):  # the directory may be gone
            free = linux.free_bytes(place.where)
        if needed is not None:
            text += f" (the save needs {needed} bytes"
            text += f", {free} are free)" if free is not None else ")"
    if number == errno.ENOENT and isinstance(place, Replacement):
        text = "the directory was removed during the save"
    text += f"; {place.outcome}"
    if number in REMEDIES:
        text += f". {REMEDIES[number]}"
    found = write_error(number, place.name, text)
    found.bytes_needed, found.bytes_free = needed, free
    return found
