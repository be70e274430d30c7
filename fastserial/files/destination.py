"""The destination of a save: chosen, opened, committed, and the errors of all that.

There are two kinds: a `Replacement`, a new file that replaces the one at a path, and a
`CallersFile`, a plain file object. torch writes to everything else itself.

A replacement is atomic: the path names the old file or the new one, never anything between. The new
file is created without a name (`O_TMPFILE`) where the file system supports that, so that a killed
process leaves nothing; elsewhere, and where others open it, too (other ranks, cuFile), under a
temporary name beside the target. It gets the attributes of the old file before the first byte. Then
the file is synced, linked under the temporary name, renamed over the target, and the directory is
synced. Where there was no file, it is linked under the target's name, and nothing is renamed.

`files/temporary` has the temporary names, and removes what killed processes left. It cannot know
all of what other hosts do: a name is renamed only if it still leads to the file that was written.
`docs/guide/durability.md` says what each step guarantees.

The attributes are owner, group, mode, ACL and extended attributes. Nobody who could not read the
old file can read the new one, not even for a moment: it is created with no more permissions, and
the ACL, which widens them, is set after the owner.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import io
import logging
import os
import stat
from collections.abc import Iterator
from time import perf_counter, sleep
from typing import Any, BinaryIO, NamedTuple, TypeVar

from fastserial.config.performance import LARGE_FILE, PAGE
from fastserial.errors import REMEDIES, WriteError, write_error
from fastserial.files import linux
from fastserial.files.linux import Attributes, attributes_of, set_attributes
from fastserial.files.nodes import is_node
from fastserial.files.paths import absolute
from fastserial.files.sources import file_name, plain_file
from fastserial.files.temporary import search_again, sweep, temporary_name
from fastserial.interrupts import OWN, Background, Descriptors, finish, ours, suppress
from fastserial.reasons import A_FILE, ANOTHER_OWNER, GIVE_A_PATH, RENAMES, Reason

_MOST_NAMES = 10  # that are tried: they are random
# No new file for us: a security module, or an owner that an idmapped mount does not know.
_NOT_FOR_US = (errno.EPERM, errno.EACCES, errno.EOVERFLOW)
# A file that is there: its mode is that of the old file, or no descriptor is left.
_NOT_OPENED = (errno.EPERM, errno.EACCES, errno.EMFILE, errno.ENFILE)
_log = logging.getLogger("fastserial")
_FIRST_PAUSE = 0.5  # seconds before a save is repeated; doubled each time
# A network or its server failed. A server that restarts does not know the file handles it gave.
_TRANSIENT = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT)
_CHANGED = "during the save it got an owner or attributes that a new file cannot have; save again"
_LOST = "another program or host removed the new file, or put another one in its place; save again"
_UNREADABLE = Reason(
    "the directory is not readable, so it cannot be synced", "let this user read the directory"
)
_LOCAL = "save to a local disk, if the file must survive a power cut"
_MAX_LINKS = 40  # as the kernel's own limit
_MOST_LOOKS = 100  # at a target that others replace or remove at the same time
_MOST_WITHOUT_PROC = 1024  # descriptors
# Types (statfs) that need no trial: these, overlayfs, ramfs, NFS, Ceph, Lustre, GPFS, BeeGFS.
_CAPABLE = linux.LOCAL | {
    0x794C7630, 0x858458F6, 0x6969, 0x00C36400, 0x0BD00BD0, 0x47504653, 0x19830326,
}  # fmt: skip
# Errors of the moment, not of the file system.
_PASSING = (
    *_TRANSIENT, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOENT,
    errno.ENAMETOOLONG, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.ENOTCONN,
)  # fmt: skip
_COPIED = 8 << 20  # bytes at a time
_linkless: set[int] = set()  # devices where a file without a name could not get one
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
_COPIED_TWICE = Reason(
    "the file system does not link a file without a name: its bytes were copied to another one",
    "none needed: the next save there makes a file with a name",
)
_SEQUENTIAL = Reason("the file system only takes the bytes of a file sequentially", RENAMES)
_NO_RENAME = Reason("the file system cannot rename a file over another", RENAMES)
_ATTRIBUTES = Reason("a new file cannot have its owner, mode, ACL or attributes", ANOTHER_OWNER)


class StockWay(NamedTuple):
    """Only torch's own code may write this target, for `reason`."""

    reason: Reason


class CannotReplace(Exception):
    """No new file can replace the target, for `reason`; nothing was changed so far."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


class TemporaryNameLostError(OSError):
    """Another program or host removed or replaced the new file before it got its name."""


class PathTarget(NamedTuple):
    """A path whose file is created or replaced.

    Attributes:
        name: the path as the user gave it.
        path: of the file, absolute, symbolic links followed (unless the link itself is to be
            replaced); relative if the current directory has no usable path.
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


def find_target(
    name: str | bytes, replace_link: bool = False, resolved: str | None = None
) -> PathTarget:
    """Return the file that a save to a path creates or replaces.

    Args:
        name: the path; one of bytes is torch's to write.
        replace_link: a symbolic link at the path is replaced, not the file that it leads to; but
            not one to a device.
        resolved: what `absolute` has made of the path.

    Raises:
        CannotReplace: it is the name of no file.
        OSError: a directory of the path is missing or not searchable for us, or the kernel does
            not follow these links for us (`nosymfollow`, `fs.protected_symlinks`).
    """
    if not isinstance(name, str):
        raise CannotReplace(_BYTES)
    start = absolute(name) if resolved is None else resolved
    if replace_link and os.path.islink(start) and not is_node(start):
        return PathTarget(name, start, os.lstat(start))
    if not name or "\0" in name or name.endswith("/"):
        raise CannotReplace(_NO_NAME)
    path, found = start, _status(start)
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
    if path != start:
        with suppress(FileNotFoundError):
            os.stat(start)  # raises where the kernel does not follow
    return PathTarget(name, path, found)


def _status(path: str, directory: int | None = None) -> os.stat_result | None:
    try:
        return os.lstat(path, dir_fd=directory)
    except ours(FileNotFoundError):
        return None


def _refused(error: OSError) -> CannotReplace | OSError:
    """Return an error of a call for attributes; unless disk or network failed, as a refusal.

    We may not set it, the file system cannot, or the owner has no number in this user namespace
    (container) or on an idmapped mount: there are many errnos for these.
    """
    has_failed = error.errno in linux.OF_THE_DISK or error.errno in _TRANSIENT
    return error if has_failed else CannotReplace(_ATTRIBUTES)


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
    magic = linux.magic_of(directory)
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


def _is_held(device: int, inode: int) -> bool:
    """Return whether a descriptor of this process should see what is saved to a file.

    `NamedTemporaryFile`, `mkstemp`, a lock (`flock`) on the checkpoint: what is saved under the
    name is expected behind the descriptor. One that is open for reading only, and holds no lock,
    is not: its reader sees the old file to its end. Nor is one of our own (`interrupts`). Takes
    about two microseconds for each descriptor of the process.
    """
    try:
        fds = list(map(int, os.listdir("/proc/self/fd")))
    except ours(OSError):  # no /proc, or no descriptor left to look into it
        fds = list(range(_MOST_WITHOUT_PROC))
    for fd in fds:
        try:
            found = os.fstat(fd)
            if found.st_ino != inode or found.st_dev != device:
                continue
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        except ours(OSError):  # closed in between
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
    except ours(OSError):
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
        except ours(OSError):  # it cannot be tried now: the save finds out
            return None
    return _incapable[key]


def _tried(directory: int) -> Reason | None:
    """Write two files, the last page first, and rename one over the other.

    Raises:
        OSError: something else is wrong, and the trial has no result.
    """
    names = temporary_name("trial"), temporary_name("trial")
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
    except ours(OSError) as error:
        if error.errno in _PASSING:
            raise
        return reason
    finally:
        for name in names:
            with suppress(OSError):
                os.unlink(name, dir_fd=directory)
    return None


@functools.cache
def _can_link() -> bool:
    """Return whether a nameless file can get a name later, for which /proc is needed."""
    return os.path.isdir("/proc/self/fd")


def _lock(fd: int) -> bool:
    """Lock a temporary file; False if another process has. True where there are no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ours(OSError) as error:
        return error.errno not in (errno.EAGAIN, errno.EACCES)
    return True


class Replacement:
    """A new file that is to replace the target; `fd` is its descriptor until `commit` or `discard`.

    Attributes:
        committed: the new file is at the target.
        fallback: what the file system could not do, or None.
        named: its temporary name; None: it has none.
        retries: what opens the target once more, after an error.
    """

    start = 0
    retries: Retries | None = None

    def __init__(self, target: PathTarget, durable: bool, named: bool = False) -> None:
        """Create the file, empty and not yet visible at the target.

        Args:
            durable: sync the file and its directory.
            named: under a temporary name from the start, by which other processes can open it.

        Raises:
            CannotReplace: no new file may replace this one. Nothing is left behind.
            OSError: it cannot be created (no space, read-only file system, ...).
        """
        self.target = target
        self.name, self.where = target.name, target.where
        self.began = perf_counter()
        self.durable = durable
        self.named: str | None = None
        self.committed = False
        self.fallback: Reason | None = None
        self.fd = self._directory = -1
        self._files = Descriptors()  # the directory's, and `fd`
        self._replaced: Descriptors | None = None  # a large old file
        self._base = os.path.basename(target.path)
        try:
            self._open_directory()
            check_replaceable(target, self._directory)
            sweep(self._directory)
            self._kept = self._attributes(target.there)
            self.fd = self._create(named)
            self._take(self._kept)
        except BaseException:
            self.discard()
            raise

    def _open_directory(self) -> None:
        try:
            self._directory = self._files.open(self.where, os.O_RDONLY | os.O_DIRECTORY)
        except ours(PermissionError) as error:
            raise CannotReplace(_UNREADABLE) from error

    def _attributes(self, there: os.stat_result | None) -> Attributes | None:
        """Return the attributes of the file to be replaced, None if there is none."""
        if there is None or not stat.S_ISREG(there.st_mode):
            return None
        try:
            return attributes_of(there, self._in_directory())
        except ours(FileNotFoundError):
            return None
        except ours(OSError) as error:
            raise _refused(error) from error

    def _in_directory(self) -> str:
        """Return a path of the target that stays in the directory, if that gets another name."""
        if _can_link():
            return f"/proc/self/fd/{self._directory}/{self._base}"
        return self.target.path

    def _take(self, attributes: Attributes | None) -> None:
        """Give the new file attributes of the old one."""
        try:
            if attributes is not None:
                set_attributes(self.fd, attributes)
        except ours(OSError) as error:
            raise _refused(error) from error

    def _create(self, named: bool) -> int:
        try:
            if not (named or self._is_linkless()) and _can_link():
                fd = self._create_nameless()
                if fd is not None:
                    return fd
            flags, mode = os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666 if self._kept is None else 0o600
            for name in self._names():
                self.named = name  # first: an interrupt may come right after the file is there
                try:
                    fd = self._files.open(name, flags, mode, self._directory)
                except ours(FileExistsError):
                    continue
                # Until it is locked, another save may take it for a leftover.
                if _lock(fd) and self._is(name, fd):
                    return fd
                self._remove_name()
                with suppress(OSError):  # a late error of an empty file
                    self._files.close_newest()
        except ours(OSError) as error:
            if error.errno not in _NOT_FOR_US:
                raise
            if error.errno == errno.EACCES and self.target.there is None:
                raise  # torch cannot make one either, and does not name the path
            text = f"no new file can be made beside it ({error.strerror})"
            raise CannotReplace(Reason(text, ANOTHER_OWNER)) from error
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    def _create_nameless(self) -> int | None:
        """Return a new file that nobody else can open; None if one with a name has to be tried.

        FUSE servers and network file systems refuse `O_TMPFILE` with whatever errno they like.
        """
        mode = 0o666 if self._kept is None else self._kept.mode & 0o777
        try:
            fd = self._files.open(".", os.O_RDWR | os.O_TMPFILE, mode, self._directory)
        except ours(OSError):
            return None
        if self._kept is None:
            linux.apply_umask(fd, self._directory)
        return fd

    def _is_linkless(self) -> bool:
        """Return whether a file without a name could not be linked in this file system before."""
        return bool(_linkless) and os.fstat(self._directory).st_dev in _linkless

    def _names(self) -> Iterator[str]:
        return (temporary_name(self._base) for _ in range(_MOST_NAMES))

    def _is(self, name: str, fd: int) -> bool:
        """Return whether a temporary name leads to an open file, as the server says, if any."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            with Descriptors() as files:
                try:
                    # NFS asks the server when a file is opened, else it may answer from memory.
                    there = os.fstat(files.open(name, flags, dir_fd=self._directory))
                except ours(OSError) as error:
                    if error.errno not in _NOT_OPENED:
                        raise
                    there = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        except ours(OSError) as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
                return False
            raise
        return os.path.samestat(there, os.fstat(fd))

    # -- the end -------------------------------------------------------------------------------

    @property
    def outcome(self) -> str:
        """What an error has left at the path."""
        if self.committed:
            return "the new file is in place, but a power cut may bring the old one back"
        return self.target.outcome

    def sync(self) -> None:
        """Put data and metadata on the device, if the save is to be durable."""
        if self.durable:
            if not linux.synced(self.fd):
                self.durable = False
                self.fallback = Reason("the file system cannot sync a file", _LOCAL)
        elif self.named is not None:  # network file systems report late errors at a close
            self._files.duplicate(self.fd)
            self._files.close_newest()

    def commit(self) -> None:
        """Make the file the target, and the change of name durable. `sync` comes before.

        Raises:
            OSError: the target is still the old file, unless only the last sync failed.
        """
        nameless, base, directory = self.named is None, self._base, self._directory
        is_new = self.target.there is None
        if not is_new:
            self._update_attributes()
        try:
            is_linked = is_new and nameless and self._link(base)
            if nameless and not is_linked:
                self._link_temporarily()
        except ours(OSError) as error:
            # A security module, or FUSE without links, refuses that with any other errno.
            if error.errno in linux.OF_THE_DISK or not os.path.isdir(self.where):
                raise
            self._copy_under_name()
            is_linked = nameless = False
        if not is_linked:
            named = self.named if nameless and self.named else self._checked_name()
            self._hold_replaced()
            try:
                os.rename(named, base, src_dir_fd=directory, dst_dir_fd=directory)
            except ours(FileNotFoundError) as error:
                raise self._lost() from error
            self.named = None
        self.committed = True
        if self.durable:
            self._sync_directory()
        if nameless:
            self._announce()
        self._close()

    def _update_attributes(self) -> None:
        """Give the new file the attributes that the old one got since, such as by `chmod 600`."""
        there = _status(self._base, self._directory)
        try:
            found = self._attributes(there)
            if found is not None and found != self._kept:
                self._take(found)
                self.sync()
        except CannotReplace as error:
            raise OSError(errno.EPERM, _CHANGED) from error

    def _link(self, name: str) -> bool:
        """Give the nameless file a name; False if there is another file of that name."""
        source = f"/proc/self/fd/{self.fd}"
        try:
            os.link(source, name, dst_dir_fd=self._directory, follow_symlinks=True)
        except ours(FileExistsError):
            return False
        return True

    def _link_temporarily(self) -> str:
        """Give the nameless file a temporary name and return it."""
        _lock(self.fd)
        for name in self._names():
            self.named = name  # first: an interrupt may come right after the link is there
            if self._link(name):
                return name
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))

    def _copy_under_name(self) -> None:
        """Copy the nameless file, which may not be linked there, to one with a temporary name.

        Raises:
            OSError: there is no space for both.
        """
        nameless, self.named = self.fd, None
        try:
            self.fd = self._create(named=True)
            if self._kept is not None:
                self._take(attributes_of(os.fstat(nameless), nameless))
        except CannotReplace as error:
            raise OSError(errno.EPERM, str(error.reason)) from error
        offset = 0
        while data := os.pread(nameless, _COPIED, offset):
            linux.write_all(self.fd, memoryview(data), offset)
            offset += len(data)
        self.sync()
        _linkless.add(os.fstat(self._directory).st_dev)
        self.fallback = self.fallback or _COPIED_TWICE

    def _checked_name(self) -> str:
        """Return the temporary name, under which the file was written.

        Raises:
            OSError: it does not lead to the file any more.
        """
        if self.named is None or not self._is(self.named, self.fd):
            raise self._lost()
        return self.named

    def _lost(self) -> OSError:
        """Return the error of a temporary name that leads elsewhere or nowhere."""
        if os.path.isdir(self.where):
            return TemporaryNameLostError(errno.ESTALE, _LOST)
        return OSError(errno.ENOENT, os.strerror(errno.ENOENT))

    def _hold_replaced(self) -> None:
        """Keep a large old file open: the rename would wait until its space is free."""
        there = self.target.there
        if there is not None and stat.S_ISREG(there.st_mode) and there.st_size >= LARGE_FILE:
            with suppress(OSError):
                flags = os.O_PATH | os.O_NOFOLLOW
                self._replaced = Descriptors()
                self._replaced.open(self._base, flags, dir_fd=self._directory)

    def _sync_directory(self) -> None:
        if not linux.synced(self._directory):
            self.durable = False
            self.fallback = Reason("the file system cannot sync a directory", _LOCAL)

    def _announce(self) -> None:
        """Let watchers of the directory see that the file is closed, as when torch writes it.

        They see the last `close` of a file without a name under a number, such as `#12`.
        """
        with suppress(OSError):  # it is closed with the others
            flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            self._files.open(self._base, flags, dir_fd=self._directory)

    def discard(self) -> None:
        """Remove the new file. Idempotent; does nothing after `commit`."""
        finish(self._remove_name, self._close)

    def _remove_name(self) -> None:
        if self.named is not None:
            try:
                if self._is(self.named, self._files.newest):
                    os.unlink(self.named, dir_fd=self._directory)
            except ours(OSError):  # the next save may be able to
                search_again(self._directory)
            self.named = None

    def _close(self) -> None:
        self.fd = -1
        finish(self._files.close)
        replaced, self._replaced = self._replaced, None
        if replaced is not None and not _freeing_threads.start(replaced.close):
            replaced.close()


_freeing_threads = Background()  # which close the last descriptor of a large file
os.register_at_fork(after_in_child=_freeing_threads.__init__)  # type: ignore[misc]


def wait_until_free() -> None:
    """Wait until the space of the files that this process replaced before is free."""
    if _freeing_threads:
        _freeing_threads.join()


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_METHODS = frozenset({"write"})  # a replaced one watches or changes the bytes
_LOCKED = Reason(
    "the file is locked (lockf): opening it once more would end the lock",
    "end the lock before the file is saved to",
)
_APPENDING = Reason(
    "the file is open for appending", 'open it with "wb", or give torch.save a path'
)


class Retries:
    """Opens a path for a save, and once more after an error of a network file system.

    Servers of network file systems and the processes behind FUSE are started again. A local disk
    that fails does not recover within seconds.

    Attributes:
        reason: that the save was repeated, for its report; None: it was not.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        durable: bool,
        replace_link: bool,
        named: bool,
        seconds: int,
    ) -> None:
        """Take the arguments of `open_path`, and how long the save may be repeated."""
        self.reason: Reason | None = None
        name = os.fspath(path)
        self._path = absolute(name) if isinstance(name, str) else name
        self._open = functools.partial(
            open_path, path, durable, replace_link, named, resolved=self._path
        )
        self._seconds = seconds
        self._deadline: float | None = None  # from the first error on: a save may take long
        self._pause = _FIRST_PAUSE

    def open(self) -> Replacement | StockWay:
        """Open the path, as `open_path` does."""
        while True:
            try:
                found = self._open()
            except ours(WriteError) as error:
                if not self.wait(error):
                    raise
                continue
            if isinstance(found, Replacement):
                found.retries = self
            return found

    def wait(self, error: WriteError) -> bool:
        """Wait before the save is repeated; False: the error will not pass, or lasted too long."""
        if self._deadline is None:
            self._deadline = perf_counter() + self._seconds
        where = os.path.dirname(os.path.realpath(self._path))  # links may lead elsewhere
        transient = error.errno in _TRANSIENT and linux.is_remote(where)
        if not transient or perf_counter() + self._pause > self._deadline:
            return False
        _log.warning("%s; the save is repeated in %g s", error, self._pause)
        sleep(self._pause)
        self._pause *= 2
        what = f"the save was repeated after an error: {os.strerror(error.errno or 0)}"
        self.reason = Reason(what, "look for errors of the mount in the kernel's log")
        return True


def open_destination(
    given: Any,
    durable: bool,
    replace_link: bool = False,
    named: bool = False,
    retry_seconds: int = 0,
) -> Destination | StockWay:
    """Open the destination of a save, or return why only torch may write it.

        found = open_destination("model.pt", durable=True)
        if isinstance(found, StockWay):
            raise ValueError(found.reason)  # such as "the file is a mount point"

    The target does not change before `commit`; without that, `discard` must be called.

    Args:
        given: a path or a file object, as for `torch.save`.
        durable, replace_link, named: as for `open_path`.
        retry_seconds: how long it is repeated while a network file system fails.

    Raises:
        WriteError: nothing can be written there, by torch neither.
    """
    if isinstance(given, str | os.PathLike):
        return Retries(given, durable, replace_link, named, retry_seconds).open()
    return _open_file(given)


def open_path(
    path: str | os.PathLike[str],
    durable: bool,
    replace_link: bool = False,
    named: bool = False,
    looks: int = _MOST_LOOKS,
    resolved: str | None = None,
) -> Replacement | StockWay:
    """Make a new file for a path, or return why only torch may write there.

    Args:
        path: of the file that is made or replaced.
        durable: sync the new file and its directory.
        replace_link: a symbolic link at the path is replaced, not the file that it leads to.
        named: make the file under a temporary name, by which other processes and cuFile open it.
        looks: how often to look at a target that others replace or remove meanwhile.
        resolved: what `absolute` has made of the path before.

    Raises:
        WriteError: nothing can be written there, by torch neither.
    """
    name, target = os.fspath(path), None
    try:
        target = find_target(name, replace_link, resolved)
        return Replacement(target, durable, named)
    except CannotReplace as why:
        reason = why.reason
    except ours(OSError) as error:
        target = target or PathTarget(name, name, None)
        may_be_stale = looks > 1 and error.errno in (errno.ENOENT, errno.EACCES)
        if may_be_stale and not _is_there_still(target):
            return open_path(path, durable, replace_link, named, looks - 1, resolved)
        full = error.errno == errno.ENOSPC and linux.is_out_of_inodes(target.where)
        if target.there is None or not full:
            raise save_error(error, target, None) from error
        reason = Reason("no inode is free for a new file", "remove files that nobody needs")
    if target is not None and os.path.islink(target.path):  # torch would write what it leads to
        text = f"The link cannot be replaced: {reason.with_remedy}; the previous file is intact"
        raise write_error(errno.EPERM, target.name, text)
    return StockWay(reason)


def _is_there_still(target: PathTarget) -> bool:
    """Return whether a target is what it was when it was looked at: nothing, or the same file."""
    there = target.there
    if there is None:
        return True
    try:
        found = os.lstat(target.path)
    except ours(OSError):
        return False
    # a new file may have the number of the one that was removed
    return os.path.samestat(found, there) and found.st_ctime_ns == there.st_ctime_ns


def _open_file(file: Any) -> CallersFile | StockWay:
    """Take a file object: only plain files on a regular file are ours.

    Other objects with a descriptor (gzip, sockets, wrappers) may write other bytes than those they
    are given, or elsewhere.
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
        if linux.is_locked(fd):
            return StockWay(_LOCKED)
        raw.flush()
        return CallersFile(raw, fd, raw.tell())
    except ours(OSError, ValueError) as error:
        return StockWay(Reason(f"the file's position is not known: {error}", GIVE_A_PATH))


def _raw_file(file: Any) -> BinaryIO | None:
    """Return the plain Python file inside a file object, or None if its type is unknown."""
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
    """Return a destination, for callers that cannot leave the save to torch.

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

    After an error it has its former size.
    """

    durable = False
    retries = None
    fallback = None
    outcome = "the save is incomplete"

    def __init__(self, file: BinaryIO, fd: int, start: int) -> None:
        """Take a file, its descriptor and its position (bytes)."""
        self.name = file_name(file, fd)
        self.fd = self.where = fd
        self.start = start
        self.file = file
        self.began = perf_counter()
        self._size_before: int | None = os.fstat(fd).st_size

    def sync(self) -> None:
        """Do nothing: the caller decides when to sync."""

    def commit(self) -> None:
        """Do nothing: the bytes are in the file."""
        self._size_before = None

    def discard(self) -> None:
        """Restore the size of the file, which also frees reserved space."""
        size, self._size_before = self._size_before, None
        if size is not None:
            with suppress(OSError):
                os.ftruncate(self.fd, size)


Destination = Replacement | CallersFile
"""The destination of a save.

Attributes of both:
    name: what the caller calls it.
    fd: descriptor of the file.
    where: a path or a descriptor on the same file system.
    start: offset in the file of the first byte (bytes).
    began: when it began to be opened (seconds of `perf_counter`).
    durable: after `sync`: what was written is on the device; after `commit` also its name.
    fallback: what the file system could not do, or None.
    outcome: what an error leaves at the target, for its text.
    retries: what opens it once more after an error; None: nothing does.

`sync` and `commit` are called after the last byte. `discard` undoes what can be undone, and does
nothing after `commit`.
"""


def _refusal_text(number: int, name: str) -> str | None:
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


def save_error(error: OSError, target: PathTarget | Destination, needed: int | None) -> WriteError:
    """Return a failed system call as the error of a save, which names what is left and a remedy.

    Args:
        error: of the system call.
        target: the target or destination of the save.
        needed: bytes of the whole save, None if that is not known.
    """
    number = error.errno or errno.EIO
    if isinstance(target, PathTarget) and (refused := _refusal_text(number, target.name)):
        return write_error(number, target.name, refused)
    text = error.strerror or str(error)
    free = None
    if number not in _FULL:
        needed = None
    else:
        with suppress(OSError):  # the directory may be gone
            free = linux.free_bytes(target.where)
        if needed is not None:
            text += f" (the save needs {needed} bytes"
            text += f", {free} are free)" if free is not None else ")"
    if number == errno.ENOENT and isinstance(target, Replacement):
        text = "the directory was removed during the save"
    text += f"; {target.outcome}"
    if number in REMEDIES and not isinstance(error, TemporaryNameLostError):
        text += f". {REMEDIES[number]}"
    found = write_error(number, target.name, text)
    found.bytes_needed, found.bytes_free = needed, free
    return found
