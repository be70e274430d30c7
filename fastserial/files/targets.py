"""What a save writes to: a path, a real file object, or neither (then torch's own way)."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import stat
from collections.abc import Iterable
from typing import Any, BinaryIO, NamedTuple

from fastserial.errors import REMEDIES, WriteError, write_error
from fastserial.files import capabilities, linux
from fastserial.files.sources import file_name, plain_file
from fastserial.interrupts import OWN, Descriptors

__all__ = [
    "FileTarget",
    "InPlaceTarget",
    "PathTarget",
    "StockWay",
    "Target",
    "file_target",
    "free_bytes_for",
    "is_held",
    "path_target",
    "target_of",
    "writable_target",
]

_METHODS = frozenset({"write"})  # whoever puts one in its place watches or changes the bytes
_MAX_LINKS = 40  # as the kernel's own limit
_LINK_MODE = 0o777  # which the kernel gives to every symbolic link
_MOST_WITHOUT_PROC = 1024  # descriptors
_RACES = 8  # so often links may be changed, or the file replaced, while we look


class PathTarget(NamedTuple):
    """A regular file to be replaced as a whole.

    Attributes:
        name: the path as the user gave it.
        path: where the file is or will be, symbolic links followed (unless the link itself is to
            be replaced); relative if `name` is.
        mode: permission bits of the file that is there, None if there is none.
        owner: its user and group.
        size: its bytes, 0 if there is none.
    """

    name: str
    path: str
    mode: int | None
    owner: tuple[int, int] | None
    size: int = 0


class FileTarget(NamedTuple):
    """An open regular file of the caller's: its Python object, descriptor and position (bytes)."""

    name: str
    file: BinaryIO
    fd: int
    offset: int


class InPlaceTarget(NamedTuple):
    """A regular file that no new file can replace: overwritten, as torch does.

    Attributes:
        name: the path as the user gave it.
        reason: why it cannot be replaced; the report's `fallback`.
        sequential: the file system takes bytes in the order of the file only.
    """

    name: str
    reason: str
    sequential: bool = False


Target = PathTarget | InPlaceTarget | FileTarget


class StockWay(NamedTuple):
    """torch must write this target itself; `reason` says why."""

    reason: str


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


def path_target(name: str) -> PathTarget | InPlaceTarget | StockWay:
    """Decide how to write to a path.

    Raises:
        WriteError: nothing can be written there (missing directory, a directory, no permission).
    """
    if not name or "\0" in name or name.endswith("/"):
        return StockWay("not a file name")
    try:
        found = _follow(name)
        if found is None:
            return StockWay("an open descriptor, not a file")
        path, existing = found
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
        return StockWay("not a file on a file system")

    def in_place(reason: str) -> InPlaceTarget:
        return InPlaceTarget(name, reason, _is_sequential(directory, magic))

    is_open = _allows(directory, os.R_OK | os.W_OK | os.X_OK)
    if existing is None:
        if not is_open:
            if not _allows(directory, os.W_OK | os.X_OK):
                raise _denial(directory, name)
            return in_place("the directory is not readable, so it cannot be synced")
        return _unless_limited(PathTarget(name, path, None, None), directory, magic)
    if stat.S_ISDIR(existing.st_mode):
        raise _refusal(errno.EISDIR, name)
    if not stat.S_ISREG(existing.st_mode):
        return StockWay("not a regular file")
    if not _allows(path, os.W_OK):
        raise _denial(directory, name)
    if not is_open:
        return in_place("this process may not write to the directory, only overwrite the file")
    if os.geteuid() not in (0, existing.st_uid):
        return in_place("the file is another user's, so it can only be overwritten")
    if linux.is_mount_point(path, parent.st_dev):
        return in_place("the file is a mount point, so it can only be overwritten")
    if parent.st_mode & stat.S_ISVTX and existing.st_uid not in (os.geteuid(), parent.st_uid):
        # Whether we may write it is for the kernel to say: `fs.protected_regular`.
        return in_place("the file is another user's, in a sticky directory")
    if is_held(existing.st_dev, existing.st_ino):
        return in_place("this process has the file open, so it is overwritten")
    mode = stat.S_IMODE(existing.st_mode)
    owner = (existing.st_uid, existing.st_gid)
    found_there = PathTarget(name, path, mode, owner, existing.st_size)
    return _unless_limited(found_there, directory, magic)


def _allows(path: str, mode: int) -> bool:
    """Return whether the effective user may do something (`os.access`) with a file."""
    if os.access(path, mode, effective_ids=True):
        return True
    # A container's filter may refuse faccessat2, which that takes; the older call asks for the
    # real user.
    is_same = (os.geteuid(), os.getegid()) == (os.getuid(), os.getgid())
    return is_same and os.access(path, mode)


def _unless_limited(target: PathTarget, directory: str, magic: int) -> PathTarget | InPlaceTarget:
    """Return the target, or how to overwrite it where the file system cannot replace files."""
    if magic in capabilities.CAPABLE:
        return target
    try:
        limit = capabilities.limit_of(directory)
    except OSError:  # then the save finds out
        return target
    return target if limit is None else InPlaceTarget(target.name, limit.reason, limit.sequential)


def _is_sequential(directory: str, magic: int) -> bool:
    """Return whether a file is to be written from its first byte to its last, as torch does."""
    if magic in capabilities.CAPABLE:
        return False
    try:
        limit = capabilities.limit_of(directory)
    except OSError:  # we may not try
        return True
    return limit is not None and limit.sequential


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
        return StockWay("not a plain file object")
    try:
        if raw.closed or not raw.writable():
            return StockWay("the file is not open for writing")
        fd = raw.fileno()
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return StockWay("not a regular file")
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND:
            return StockWay("the file is open for appending")
        raw.flush()
        offset = raw.tell()
    except (OSError, ValueError) as error:
        return StockWay(f"the file's position is not known: {error}")
    return FileTarget(file_name(raw, fd), raw, fd, offset)


def target_of(target: Any, replace_link: bool = False) -> Target | StockWay:
    """Decide how to write to what was given to `torch.save`, a path or a file object.

    Args:
        replace_link: a symbolic link at the path is replaced, not the file that it leads to.

    Raises:
        WriteError: nothing can be written there.
    """
    if not isinstance(target, str | os.PathLike):
        return file_target(target)
    name = os.fspath(target)
    if replace_link and os.path.islink(name):
        return PathTarget(os.fsdecode(name), os.fsdecode(name), _LINK_MODE, None)
    return path_target(name) if isinstance(name, str) else StockWay("its path is bytes, not text")


def writable_target(
    target: str | os.PathLike[str] | BinaryIO,
) -> Target:
    """Return what a FastFileWriter can write.

    Raises:
        WriteError: it cannot be written, or only torch's own way.
    """
    found = target_of(target)
    if isinstance(found, StockWay):
        name = os.fsdecode(target) if isinstance(target, str | os.PathLike) else repr(target)
        raise write_error(errno.EINVAL, name, f"a FastFileWriter cannot write this: {found.reason}")
    return found


def free_bytes_for(target: Target, fd: int) -> int | None:
    """Return the bytes free where the target lies, None if that is no longer known.

    Args:
        fd: of the file that is written.
    """
    with contextlib.suppress(OSError):
        if isinstance(target, PathTarget):
            return linux.free_bytes(os.path.dirname(target.path) or os.curdir)
        if isinstance(target, InPlaceTarget):  # after an error, its descriptor is closed
            exists = os.path.exists(target.name)
            return linux.free_bytes(target.name if exists else os.path.dirname(target.name) or ".")
        return linux.free_bytes(fd)
    return None


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
