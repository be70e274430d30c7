"""What a save writes to: a path, a plain file object, or neither (then torch writes it)."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import stat
from collections.abc import Iterable
from typing import Any, BinaryIO, NamedTuple

from fastserial.errors import REMEDIES, WriteError, write_error
from fastserial.files import linux
from fastserial.files.capabilities import why_incapable
from fastserial.files.sources import file_name, plain_file
from fastserial.interrupts import OWN, Descriptors
from fastserial.reasons import A_FILE, ANOTHER_OWNER, GIVE_A_PATH, Reason

__all__ = [
    "FileTarget",
    "PathTarget",
    "StockWay",
    "Target",
    "file_target",
    "is_held",
    "path_target",
]

_METHODS = frozenset({"write"})  # whoever puts one in its place watches or changes the bytes
_MAX_LINKS = 40  # as the kernel's own limit
_MOST_WITHOUT_PROC = 1024  # descriptors
_RACES = 8  # so often links may be changed, or the file replaced, while we look


class PathTarget(NamedTuple):
    """A path at which a new file takes the place of what is there.

    Attributes:
        name: the path as the user gave it.
        path: where the file is or will be, symbolic links followed (unless the link itself is to
            be replaced); relative if `name` is.
        there: status of the regular file, or of the link, that is to be replaced; None if there
            is none.
    """

    name: str
    path: str
    there: os.stat_result | None


class FileTarget(NamedTuple):
    """An open regular file of the caller's: its Python object, descriptor and position (bytes)."""

    name: str
    file: BinaryIO
    fd: int
    offset: int


Target = PathTarget | FileTarget

_DESCRIPTOR = Reason("an open descriptor, not a file", "give torch.save the file's path")
_UNREADABLE = Reason(
    "the directory is not readable, so it cannot be synced", "let this user read the directory"
)
_UNWRITABLE = Reason(
    "this process may not write to the directory, only to the file",
    "let this user write to the directory",
)
_HELD = Reason("this process has the file open or locked", "close the file before it is saved to")
_APPENDING = Reason(
    "the file is open for appending", 'open it with "wb", or give torch.save a path'
)


class StockWay(NamedTuple):
    """Only torch's own code may write this target; `reason` says why."""

    reason: Reason


def _follow(name: str) -> tuple[str, os.stat_result | None] | None:
    """Return the file a chain of symbolic links ends at and its status, None if there is no file.

    Returns None if the chain leads through /proc, to a descriptor.

    Raises:
        OSError: a directory on the way is missing or not ours to search, or the kernel does not
            follow these links for us (`nosymfollow`, `fs.protected_symlinks`).
    """
    for _ in range(_RACES):
        path, links = name, 0
        found = _status(path, follow=False)
        while found is not None and stat.S_ISLNK(found.st_mode):
            directory = os.path.dirname(path)
            if linux.magic_of(directory or os.curdir) == linux.PROC:
                return None
            links += 1
            if links > _MAX_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            # Left to the kernel to resolve: the directories above may not be ours to read.
            path = os.path.join(directory, os.readlink(path))
            found = _status(path, follow=False)
        if not links or _identity(found) == _identity(_status(name, follow=True)):
            return path, found
    raise OSError(errno.ELOOP, "The links there are being changed")


def _status(path: str, *, follow: bool) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=follow)
    except FileNotFoundError:
        return None


def _identity(found: os.stat_result | None) -> tuple[int, int] | None:
    return (found.st_dev, found.st_ino) if found is not None else None


def _is_removed(directory: str, parent: os.stat_result) -> bool:
    """Return whether a directory was removed, but is still our current one.

    Some file systems give every directory 0 links.
    """
    if parent.st_nlink:
        return False
    try:
        with Descriptors() as files:
            fd = files.open(directory, os.O_PATH | os.O_DIRECTORY)
            return os.readlink(f"/proc/self/fd/{fd}").endswith(" (deleted)")
    except OSError:  # then the save finds out
        return False


def path_target(name: str | bytes, replace_link: bool = False) -> PathTarget | StockWay:
    """Decide how to write to a path.

    Args:
        name: the path; one of bytes is torch's to write.
        replace_link: a symbolic link at the path is replaced, not the file that it leads to.

    Raises:
        WriteError: nothing can be written there (missing directory, a directory, no permission).
    """
    if not isinstance(name, str):
        return StockWay(Reason("its path is bytes, not text", "give torch.save a str or a Path"))
    if replace_link and os.path.islink(name):
        return PathTarget(name, name, os.lstat(name))
    if not name or "\0" in name or name.endswith("/"):
        return StockWay(Reason("not a file name", "give torch.save the name of a file"))
    try:
        found = _follow(name)
        if found is None:
            return StockWay(_DESCRIPTOR)
        path, there = found
        directory = os.path.dirname(path) or os.curdir
        parent = os.stat(directory)
    except OSError as error:
        raise _refusal(error.errno or errno.EIO, name) from error
    if not stat.S_ISDIR(parent.st_mode):
        raise _refusal(errno.ENOTDIR, name)
    if _is_removed(directory, parent):
        raise _refusal(errno.ENOENT, name)
    magic = linux.magic_of(directory)
    if magic == linux.PROC:
        return StockWay(Reason("not a file on a file system", A_FILE))
    is_open = _allows(directory, os.R_OK | os.W_OK | os.X_OK)
    if there is None:
        if not is_open and not _allows(directory, os.W_OK | os.X_OK):
            raise _denial(directory, name)
        if not is_open:
            return StockWay(_UNREADABLE)
    else:
        if stat.S_ISDIR(there.st_mode):
            raise _refusal(errno.EISDIR, name)
        if not stat.S_ISREG(there.st_mode):
            return StockWay(Reason("not a regular file", A_FILE))
        if not _allows(path, os.W_OK):
            raise _denial(directory, name)
        if not is_open:
            return StockWay(_UNWRITABLE)
        reason = _why_kept(path, there, parent)
        if reason is not None:
            return StockWay(reason)
    limit = why_incapable(directory, magic)
    return PathTarget(name, path, there) if limit is None else StockWay(limit)


def _why_kept(path: str, there: os.stat_result, parent: os.stat_result) -> Reason | None:
    """Return why no new file may take the place of a file that we may write, None if one may."""
    if os.geteuid() not in (0, there.st_uid):
        return Reason("the file is another user's", ANOTHER_OWNER)
    if linux.is_mount_point(path, parent.st_dev):
        return Reason("the file is a mount point", "mount the directory instead of the file")
    if parent.st_mode & stat.S_ISVTX and there.st_uid not in (os.geteuid(), parent.st_uid):
        # Whether we may write it is for the kernel to say: `fs.protected_regular`.
        return Reason("the file is another user's, in a sticky directory", ANOTHER_OWNER)
    if is_held(there.st_dev, there.st_ino):
        return _HELD
    return None


def _allows(path: str, mode: int) -> bool:
    """Return whether the effective user may do something (`os.access`) with a file."""
    if os.access(path, mode, effective_ids=True):
        return True
    # A container's filter may refuse faccessat2, which that takes; the older call asks for the
    # real user.
    is_same = (os.geteuid(), os.getegid()) == (os.getuid(), os.getgid())
    return is_same and os.access(path, mode)


def _denial(directory: str, name: str) -> WriteError:
    return _refusal(errno.EROFS if linux.is_read_only(directory) else errno.EACCES, name)


def _refusal(number: int, name: str) -> WriteError:
    directory = os.path.dirname(name) or "."
    texts = {
        errno.ENOENT: f"Parent directory {directory} does not exist. Create it first, for "
        f"instance with os.makedirs({directory!r}, exist_ok=True)",
        errno.EISDIR: "The target is a directory; give the path of a file in it",
        errno.ENOTDIR: f"{directory} is not a directory",
        errno.EROFS: f"{directory} is on a read-only file system. {REMEDIES[errno.EROFS]}",
        errno.ELOOP: "The system does not follow the symbolic links there (a loop, `nosymfollow`); "
        "give the path of the file itself",
        errno.EACCES: "No permission to write the file; check the modes and owners of the file "
        "and its directory",
    }
    return write_error(number, name, texts.get(number))


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


def file_target(file: Any) -> FileTarget | StockWay:
    """Decide how to write to a file object: only plain files on a regular file are ours.

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
        offset = raw.tell()
    except (OSError, ValueError) as error:
        return StockWay(Reason(f"the file's position is not known: {error}", GIVE_A_PATH))
    return FileTarget(file_name(raw, fd), raw, fd, offset)


def is_held(device: int, inode: int) -> bool:
    """Return whether a descriptor of this process should see what is saved to a file.

    `NamedTemporaryFile`, `mkstemp`, a lock (`flock`) on the checkpoint: what is saved under the
    name is expected behind the descriptor. One that is open for reading only, and holds no lock,
    is not: whoever reads sees the old file to its end. Nor is one of our own (`interrupts`). Takes
    about two microseconds for each descriptor of the process.
    """
    for fd in _descriptors():
        try:
            found = os.fstat(fd)
            if found.st_ino != inode or found.st_dev != device:
                continue
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        except OSError:  # closed in between
            continue
        if flags & (OWN | os.O_PATH):  # the latter cannot read
            continue
        if flags & os.O_ACCMODE != os.O_RDONLY:
            return True
        if _holds_lock(fd):
            return True
    return False


def _descriptors() -> Iterable[int]:
    try:
        return map(int, os.listdir("/proc/self/fd"))
    except OSError:  # no /proc, or no descriptor left to look into it
        return range(_MOST_WITHOUT_PROC)


def _holds_lock(fd: int) -> bool:
    """Return whether a lock (`flock`, `lockf`) was taken through a descriptor.

    Other locks on the file do not count: a save holds one on its new file.
    """
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="utf-8", errors="replace") as lines:
            return any(line.startswith("lock:") for line in lines)
    except OSError:
        return False
