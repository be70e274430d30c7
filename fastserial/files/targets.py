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
from typing import NamedTuple, NoReturn

from fastserial.config.performance import PAGE
from fastserial.errors import REMEDIES
from fastserial.files import linux
from fastserial.interrupts import OWN, Descriptors
from fastserial.reasons import A_FILE, ANOTHER_OWNER, RENAMES, Reason

_MAX_LINKS = 40  # as the kernel's own limit
_MOST_WITHOUT_PROC = 1024  # descriptors
# Types (statfs) that need no trial: these, overlayfs, ramfs, NFS, Ceph, Lustre, GPFS, BeeGFS.
_CAPABLE = linux.LOCAL | {
    0x794C7630, 0x858458F6, 0x6969, 0x00C36400, 0x0BD00BD0, 0x47504653, 0x19830326,
}  # fmt: skip
# We may not, or the file system cannot; anything else is a failure. EINVAL and EOVERFLOW: an owner
# that has no number in this user namespace (container), or on an idmapped mount.
_REFUSED = (
    errno.EPERM, errno.EACCES, errno.EINVAL, errno.EOVERFLOW, errno.EOPNOTSUPP, errno.ENOSYS,
    errno.E2BIG, errno.ERANGE,
)  # fmt: skip
# Errors of the moment, not of the file system.
_PASSING = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOENT, errno.ENAMETOOLONG,
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.ENOTCONN, errno.EIO,
    errno.ESTALE,
)  # fmt: skip
_incapable: dict[tuple[int, int], Reason | None] = {}  # by device and mount

_NO_NAME = Reason("not a file name", "give torch.save the name of a file")
_BYTES = Reason("its path is bytes, not text", "give torch.save a str or a Path")
_DESCRIPTOR = Reason("an open descriptor, not a file", "give torch.save the file's path")
_NO_FILE = Reason("not a regular file", A_FILE)
_FOREIGN = Reason("the file is another user's", ANOTHER_OWNER)
_STICKY = Reason("the file is another user's, in a sticky directory", ANOTHER_OWNER)
_MOUNTED = Reason("the file is a mount point", "mount the directory instead of the file")
_HELD = Reason("this process has the file open or locked", "close the file before it is saved to")
_APPEND_ONLY = Reason("nothing in an append-only directory can be replaced", RENAMES)
_SEQUENTIAL = Reason("the file system only takes the bytes of a file sequentially", RENAMES)
_NO_RENAME = Reason("the file system cannot rename a file over another", RENAMES)
_UNKNOWN_OWNER = Reason("its owner is unknown in this user namespace", ANOTHER_OWNER)
_ATTRIBUTES = Reason("a new file cannot have its owner, mode, ACL or attributes", ANOTHER_OWNER)


class StockWay(NamedTuple):
    """Only torch's own code may write this target, for `reason`."""

    reason: Reason


class CannotReplace(Exception):
    """No new file can replace the target, for `reason`; nothing was changed so far."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


class PathTarget(NamedTuple):
    """A path whose file is created or replaced.

    Attributes:
        name: the path as the user gave it.
        path: of the file, symbolic links followed (unless the link itself is to be replaced);
            relative if `name` is.
        there: status of what is at the path; None if nothing is.
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


def find_target(name: str | bytes, replace_link: bool = False) -> PathTarget:
    """Return the file that a save to a path creates or replaces.

    Args:
        name: the path; one of bytes is torch's to write.
        replace_link: a symbolic link at the path is replaced, not the file that it leads to.

    Raises:
        CannotReplace: it is the name of no file.
        OSError: a directory of the path is missing or not searchable for us, or the kernel does
            not follow these links for us (`nosymfollow`, `fs.protected_symlinks`).
    """
    if not isinstance(name, str):
        raise CannotReplace(_BYTES)
    if replace_link and os.path.islink(name):
        return PathTarget(name, name, os.lstat(name))
    if not name or "\0" in name or name.endswith("/"):
        raise CannotReplace(_NO_NAME)
    path, found = name, _status(name)
    for _ in range(_MAX_LINKS):
        if found is None or not stat.S_ISLNK(found.st_mode):
            break
        directory = os.path.dirname(path)
        if linux.magic_of(directory or os.curdir) == linux.PROC:
            raise CannotReplace(_DESCRIPTOR)
        # Left to the kernel to resolve: the directories above may not be ours to read.
        path = os.path.join(directory, os.readlink(path))
        found = _status(path)
    else:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
    if path != name:
        with contextlib.suppress(FileNotFoundError):
            os.stat(name)  # raises where the kernel does not follow
    return PathTarget(name, path, found)


def _status(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def check_replaceable(target: PathTarget, directory: int) -> None:
    """Raise if no new file can be made at a target that we may write.

    Args:
        target: of a file.
        directory: the descriptor of its directory.

    Raises:
        CannotReplace: torch has to write there.
        OSError: nothing can be written there, by torch neither.
    """
    there, path = target.there, target.path
    magic = linux.magic_of(target.where)
    if magic == linux.PROC:
        raise CannotReplace(_NO_FILE)
    if there is not None and not stat.S_ISLNK(there.st_mode):
        if stat.S_ISDIR(there.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(there.st_mode):
            raise CannotReplace(_NO_FILE)
        if not _is_writable(path):
            number = errno.EROFS if linux.is_read_only(target.where) else errno.EACCES
            raise OSError(number, os.strerror(number))
        parent, user = os.fstat(directory), os.geteuid()
        if user not in (0, there.st_uid):
            raise CannotReplace(_FOREIGN)
        if linux.is_mount_point(path, parent.st_dev):
            raise CannotReplace(_MOUNTED)
        if parent.st_mode & stat.S_ISVTX and there.st_uid not in (user, parent.st_uid):
            # The kernel decides whether we may write it: `fs.protected_regular`.
            raise CannotReplace(_STICKY)
        if _is_held(there.st_dev, there.st_ino):
            raise CannotReplace(_HELD)
    if linux.is_append_only(directory):
        raise CannotReplace(_APPEND_ONLY)
    if magic not in _CAPABLE:
        reason = _why_incapable(target.where, directory)
        if reason is not None:
            raise CannotReplace(reason)


def _is_writable(path: str) -> bool:
    if os.access(path, os.W_OK, effective_ids=True):
        return True
    # A container's filter may refuse faccessat2, which that takes; the older call asks for the
    # real user.
    is_same = (os.geteuid(), os.getegid()) == (os.getuid(), os.getgid())
    return is_same and os.access(path, os.W_OK)


def refusal_text(number: int, name: str) -> str | None:
    """Return what a user has to know of a path where nothing can be written, None for more errors.

    Args:
        number: the `errno` with which the target could not be opened.
        name: the path.
    """
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
    return texts.get(number)


def _is_held(device: int, inode: int) -> bool:
    """Return whether a descriptor of this process should see what is saved to a file.

    `NamedTemporaryFile`, `mkstemp`, a lock (`flock`) on the checkpoint: what is saved under the
    name is expected behind the descriptor. One that is open for reading only, and holds no lock,
    is not: its reader sees the old file to its end. Nor is one of our own (`interrupts`). Takes
    about two microseconds for each descriptor of the process.
    """
    try:
        fds = list(map(int, os.listdir("/proc/self/fd")))
    except OSError:  # no /proc, or no descriptor left to look into it
        fds = list(range(_MOST_WITHOUT_PROC))
    for fd in fds:
        try:
            found = os.fstat(fd)
            if found.st_ino != inode or found.st_dev != device:
                continue
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        except OSError:  # closed in between
            continue
        if flags & (OWN | os.O_PATH):  # the latter cannot read
            continue
        if flags & os.O_ACCMODE != os.O_RDONLY or _holds_lock(fd):
            return True
    return False


def _holds_lock(fd: int) -> bool:
    """Return whether a lock (`flock`, `lockf`) was taken through a descriptor.

    Other locks on the file do not count: a save holds one on its new file.
    """
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="utf-8", errors="replace") as lines:
            return any(line.startswith("lock:") for line in lines)
    except OSError:
        return False


def _why_incapable(directory: str, fd: int) -> Reason | None:
    """Return why no file can be replaced in a directory; None if one can, or if that is not known.

    Object stores and old distributed file systems behind FUSE may have no `rename` over a file that
    is there, or only take its bytes sequentially. An error of the rename itself would come too
    late: by then torch has pickled. So where the type is unknown, two small files are tried, once
    for each mount in a process.
    """
    key = (os.fstat(fd).st_dev, linux.mount_of(directory))
    if key not in _incapable:
        try:
            _incapable[key] = _tried(fd)
        except OSError:  # it cannot be tried now: the save finds out
            return None
    return _incapable[key]


def _tried(directory: int) -> Reason | None:
    """Write two files, the last page first, and rename one over the other.

    Raises:
        OSError: something else is wrong, and the trial has no result.
    """
    stem = f".fastserial-trial-{os.getpid()}-{os.urandom(4).hex()}"
    names = f"{stem}-1.tmp", f"{stem}-2.tmp"
    reason = _SEQUENTIAL
    try:
        for name in names:
            with Descriptors() as files:
                fd = files.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600, directory)
                for offset in (PAGE, 0):
                    os.pwrite(fd, bytes(PAGE), offset)
                files.close_newest()
            reason = _NO_RENAME
        os.rename(names[1], names[0], src_dir_fd=directory, dst_dir_fd=directory)
    except OSError as error:
        if error.errno in _PASSING:
            raise
        return reason
    finally:
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=directory)
    return None


# Made for the old content: the kernel takes them off a file that is written to.
_OF_THE_CONTENT = frozenset({"security.capability", "security.evm", "security.ima"})
# Users, administrators and the kernel rely on these; other kinds belong to the file system.
_KEPT = ("user.", "security.", "system.", "btrfs.")
_ACL = "system."
_NOBODY = 65534  # what the kernel shows for an owner who is not known here


class Attributes(NamedTuple):
    """A file's permission bits, user and group, and its extended attributes, ACL included."""

    mode: int
    owner: tuple[int, int]
    extended: dict[str, bytes]


def _raise_refused(error: OSError) -> NoReturn:
    """Raise an error of a call for attributes; a refusal as a `CannotReplace`."""
    if error.errno in _REFUSED:
        raise CannotReplace(_ATTRIBUTES) from error
    raise error


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
    extended: dict[str, bytes] = {}
    try:
        for name in os.listxattr(file, follow_symlinks=follow):
            if name.startswith(_KEPT) and name not in _OF_THE_CONTENT:
                extended[name] = os.getxattr(file, name, follow_symlinks=follow)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):  # there are none
            _raise_refused(error)
    return Attributes(stat.S_IMODE(status.st_mode), (status.st_uid, status.st_gid), extended)


def set_attributes(fd: int, wanted: Attributes) -> None:
    """Give a new file of ours, which has no more permissions, the attributes of another one.

    Raises:
        CannotReplace: one of them is refused.
        OSError: the disk is full or failed.
    """
    made = attributes_of(os.fstat(fd), fd)
    if made == wanted:
        return
    if any(one == _NOBODY != own for one, own in zip(wanted.owner, made.owner, strict=True)):
        raise CannotReplace(_UNKNOWN_OWNER)  # or `nobody`
    names = made.extended.keys() | wanted.extended.keys()
    differing = {name for name in names if made.extended.get(name) != wanted.extended.get(name)}
    lists = {name for name in differing if name.startswith(_ACL)}
    try:
        _set_extended(fd, differing - lists, wanted)  # as long as the file is ours
        if made.owner != wanted.owner:
            os.fchown(fd, *wanted.owner)
        # An ACL changes the group's bits, a new owner clears others. Where the owner is not us,
        # this takes the right that replacing a file in a sticky directory takes.
        _set_extended(fd, lists, wanted)
        if stat.S_IMODE(os.fstat(fd).st_mode) != wanted.mode or made.owner != wanted.owner:
            os.fchmod(fd, wanted.mode)
    except OSError as error:
        _raise_refused(error)
    now = attributes_of(os.fstat(fd), fd)  # some file systems only pretend
    has_lists = all((name in now.extended) == (name in wanted.extended) for name in lists)
    if now.owner != wanted.owner or (now.mode ^ wanted.mode) & 0o777 or not has_lists:
        raise CannotReplace(_ATTRIBUTES)


def _set_extended(fd: int, names: set[str], wanted: Attributes) -> None:
    """Set extended attributes, and remove those that were inherited from the folder."""
    for name in names:
        if name in wanted.extended:
            os.setxattr(fd, name, wanted.extended[name])
        else:
            os.removexattr(fd, name)
