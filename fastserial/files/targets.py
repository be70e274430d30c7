"""Whether a new file can replace the one at a path, and the attributes that it takes over.

Where no new file can, torch writes the file itself.

The attributes are owner, group, mode, ACL and extended attributes. Nobody who could not read the
old file can read the new one, not even for a moment: it is created with no more permissions, and
the ACL, which widens them, is set after the owner.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from typing import NamedTuple, NoReturn

from fastserial.config.performance import PAGE
from fastserial.errors import REMEDIES, WriteError, write_error
from fastserial.files import linux
from fastserial.interrupts import OWN, Descriptors
from fastserial.reasons import A_FILE, ANOTHER_OWNER, RENAMES, Reason

__all__ = [
    "Attributes",
    "CannotReplace",
    "PathTarget",
    "StockWay",
    "attributes_of",
    "give",
    "is_held",
    "path_target",
    "why_incapable",
]

_MAX_LINKS = 40  # as the kernel's own limit
_MOST_WITHOUT_PROC = 1024  # descriptors
# Types (statfs) that need no trial: ext2 to ext4, XFS, btrfs, tmpfs, overlayfs, F2FS, ZFS,
# bcachefs, ramfs, NFS, Ceph, Lustre, GPFS, BeeGFS.
_CAPABLE = frozenset(
    {
        0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x794C7630, 0xF2F52010, 0x2FC12FC1,
        0xCA451A4E, 0x858458F6, 0x6969, 0x00C36400, 0x0BD00BD0, 0x47504653, 0x19830326,
    }
)  # fmt: skip
# Errors of the moment, not of the file system.
_PASSING = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOENT, errno.ENAMETOOLONG,
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.ENOTCONN, errno.EIO,
    errno.ESTALE,
)  # fmt: skip
_known: dict[tuple[int, int], Reason | None] = {}  # by device and mount


class PathTarget(NamedTuple):
    """A path whose file is created or replaced.

    Attributes:
        name: the path as the user gave it.
        path: of the file, symbolic links followed (unless the link itself is to be replaced);
            relative if `name` is.
        there: status of the regular file, or of the link, that is to be replaced; None if there
            is none.
    """

    name: str
    path: str
    there: os.stat_result | None

    @property
    def where(self) -> str:
        """The directory that the file is in."""
        return os.path.dirname(self.path) or os.curdir

    @property
    def outcome(self) -> str:
        """What an error leaves at the path."""
        return "no file was made" if self.there is None else "the previous file is intact"


_DESCRIPTOR = Reason("an open descriptor, not a file", "give torch.save the file's path")
_UNREADABLE = Reason(
    "the directory is not readable, so it cannot be synced", "let this user read the directory"
)
_UNWRITABLE = Reason(
    "this process may not write to the directory, only to the file",
    "let this user write to the directory",
)
_HELD = Reason("this process has the file open or locked", "close the file before it is saved to")


class StockWay(NamedTuple):
    """Only torch's own code may write this target, for `reason`."""

    reason: Reason


def _follow(name: str) -> tuple[str, os.stat_result | None] | None:
    """Return the file a chain of symbolic links ends at and its status, None if there is no file.

    Returns None if the chain leads through /proc, to a descriptor.

    Raises:
        OSError: a directory of the path is missing or not searchable for us, or the kernel does
            not follow these links for us (`nosymfollow`, `fs.protected_symlinks`).
    """
    path = name
    found = _status(path, follow=False)
    for _ in range(_MAX_LINKS):
        if found is None or not stat.S_ISLNK(found.st_mode):
            if path != name:
                _status(name, follow=True)  # raises where the kernel does not follow
            return path, found
        directory = os.path.dirname(path)
        if linux.magic_of(directory or os.curdir) == linux.PROC:
            return None
        # Left to the kernel to resolve: the directories above may not be ours to read.
        path = os.path.join(directory, os.readlink(path))
        found = _status(path, follow=False)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _status(path: str, *, follow: bool) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=follow)
    except FileNotFoundError:
        return None


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
    """Return why no new file may replace a file that we may write, None if one may."""
    if os.geteuid() not in (0, there.st_uid):
        return Reason("the file is another user's", ANOTHER_OWNER)
    if linux.is_mount_point(path, parent.st_dev):
        return Reason("the file is a mount point", "mount the directory instead of the file")
    if parent.st_mode & stat.S_ISVTX and there.st_uid not in (os.geteuid(), parent.st_uid):
        # The kernel decides whether we may write it: `fs.protected_regular`.
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


def is_held(device: int, inode: int) -> bool:
    """Return whether a descriptor of this process should see what is saved to a file.

    `NamedTemporaryFile`, `mkstemp`, a lock (`flock`) on the checkpoint: what is saved under the
    name is expected behind the descriptor. One that is open for reading only, and holds no lock,
    is not: its reader sees the old file to its end. Nor is one of our own (`interrupts`). Takes
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


def why_incapable(directory: str, magic: int) -> Reason | None:
    """Return why no file can be replaced in a directory; None if one can, or if that is not known.

    Object stores and old distributed file systems behind FUSE may have no `rename` over a file that
    is there, or only take its bytes sequentially. An error of the rename itself would come too
    late: by then torch has pickled. So where the type is unknown, two small files are tried, once
    for each mount in a process.

    Args:
        magic: the type of its file system (`linux.magic_of`).
    """
    if magic in _CAPABLE:
        return None
    try:
        key = (os.stat(directory).st_dev, linux.mount_of(directory))
        if key not in _known:
            _known[key] = _tried(directory)
        return _known[key]
    except OSError:  # it cannot be tried now: the save finds out
        return None


def _tried(directory: str) -> Reason | None:
    """Write two files and rename one over the other.

    Raises:
        OSError: something else is wrong, and the trial has no result.
    """
    stem = os.path.join(directory, f".fastserial-trial-{os.getpid()}-{os.urandom(4).hex()}")
    first, second = f"{stem}-1.tmp", f"{stem}-2.tmp"
    reason = Reason("the file system only takes the bytes of a file sequentially", RENAMES)
    try:
        _write_backwards(first)
        reason = Reason("the file system cannot rename a file over another", RENAMES)
        _write_backwards(second)
        os.rename(second, first)
    except OSError as error:
        if error.errno in _PASSING:
            raise
        return reason
    finally:
        for path in (first, second):
            with contextlib.suppress(OSError):
                os.unlink(path)
    return None


def _write_backwards(path: str) -> None:
    """Make a file of two pages, the last one first.

    Where that is refused no file is made, which matters where none can be removed.

    Raises:
        OSError: it is refused.
    """
    with Descriptors() as files:
        fd = files.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        for offset in (PAGE, 0):
            os.pwrite(fd, bytes(PAGE), offset)
        files.close_newest()


# We may not, or the file system cannot; anything else is a failure.
_REFUSED = (
    errno.EPERM,
    errno.EACCES,
    errno.EINVAL,  # an owner that has no number in this user namespace (container)
    errno.EOVERFLOW,  # the same, on an idmapped mount
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.E2BIG,
    errno.ERANGE,
)
# Made for the old content: the kernel takes them off a file that is written to.
_OF_THE_CONTENT = frozenset({"security.capability", "security.evm", "security.ima"})
# Users, administrators and the kernel rely on these; other kinds are the file system's own affair.
_KEPT = ("user.", "security.", "system.", "btrfs.")
_ACL = "system."
_UNREADABLE_ATTRIBUTES = "its extended attributes cannot be read"
_NOBODY = 65534  # what the kernel shows for an owner who is not known here


class CannotReplace(Exception):
    """No new file can replace the target, for `reason`; nothing was changed so far."""

    def __init__(self, text: str, remedy: str = ANOTHER_OWNER) -> None:
        super().__init__(text)
        self.reason = Reason(text, remedy)


class Attributes(NamedTuple):
    """A file's permission bits, user and group, and its extended attributes, ACL included."""

    mode: int
    owner: tuple[int, int]
    extended: dict[str, bytes]


def attributes_of(status: os.stat_result, file: int | str) -> Attributes:
    """Return the attributes of a regular file.

    Args:
        status: of the file.
        file: its descriptor or path.

    Raises:
        CannotReplace: an attribute may not be read.
        OSError: the disk failed, or the file is gone.
    """
    follow = isinstance(file, int)
    extended = {}
    try:
        names = os.listxattr(file, follow_symlinks=follow)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            _raise_refusal(error, _UNREADABLE_ATTRIBUTES)
        names = []
    for name in names:
        if not name.startswith(_KEPT) or name in _OF_THE_CONTENT:
            continue
        try:
            extended[name] = os.getxattr(file, name, follow_symlinks=follow)
        except OSError as error:
            if error.errno != errno.ENODATA:  # removed in between
                _raise_refusal(error, _UNREADABLE_ATTRIBUTES)
    owner = (status.st_uid, status.st_gid)
    return Attributes(stat.S_IMODE(status.st_mode), owner, extended)


def give(fd: int, wanted: Attributes) -> None:
    """Give a new file of ours, which has no more permissions, the attributes of another one.

    Raises:
        CannotReplace: one of them is refused.
        OSError: the disk is full or failed.
    """
    made = attributes_of(os.fstat(fd), fd)
    if made == wanted:
        return
    if any(one == _NOBODY != own for one, own in zip(wanted.owner, made.owner, strict=True)):
        raise CannotReplace("its owner is unknown in this user namespace")  # or `nobody`
    differing = sorted(
        name
        for name in made.extended.keys() | wanted.extended.keys()
        if made.extended.get(name) != wanted.extended.get(name)
    )
    lists = [name for name in differing if name.startswith(_ACL)]
    for name in differing:
        if name not in lists:  # as long as the file is ours
            _set_extended(fd, name, wanted.extended.get(name))
    if made.owner != wanted.owner:
        with _refused_as(_text("owner")):
            os.fchown(fd, *wanted.owner)
    # An ACL changes the group's bits, a new owner clears others. Where the owner is not us, this
    # takes the right that replacing a file in a sticky directory takes.
    for name in lists:
        _set_extended(fd, name, wanted.extended.get(name))
    with _refused_as(_text("mode")):
        if stat.S_IMODE(os.fstat(fd).st_mode) != wanted.mode or made.owner != wanted.owner:
            os.fchmod(fd, wanted.mode)
    now = attributes_of(os.fstat(fd), fd)  # some file systems only pretend
    has_lists = all((name in now.extended) == (name in wanted.extended) for name in lists)
    if now.owner != wanted.owner or (now.mode ^ wanted.mode) & 0o777 or not has_lists:
        raise CannotReplace(_text("owner, mode or ACL"))


def _text(what: str) -> str:
    return f"a new file cannot have its {what}"


@contextlib.contextmanager
def _refused_as(text: str) -> Iterator[None]:
    """Raise a refusal in the body as a `CannotReplace` of that text."""
    try:
        yield
    except OSError as error:
        _raise_refusal(error, text)


def _raise_refusal(error: OSError, text: str) -> NoReturn:
    if error.errno not in _REFUSED:
        raise error
    raise CannotReplace(text) from error


def _set_extended(fd: int, name: str, value: bytes | None) -> None:
    """Set an extended attribute, or remove one that was inherited from the folder."""
    with _refused_as(_text(f"attribute {name}")):
        if value is not None:
            os.setxattr(fd, name, value)
        else:
            os.removexattr(fd, name)
