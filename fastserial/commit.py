"""Replacing a file as a whole: the target is the old file or the new one, never between.

The new file is made without a name (`O_TMPFILE`) where the file system can, so that a killed
process leaves nothing; elsewhere under a temporary name beside the target. Then: sync the file,
give it the temporary name, rename it over the target, sync the directory.

Temporary names are numbered per target. Whoever owns one holds a lock (`flock`) on it, so a name
nobody locks was left by a killed process, and the next save to the target removes it.
`docs/durability.md` says what each step guarantees.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import stat
from collections.abc import Iterator
from itertools import chain

from fastserial import freeing
from fastserial.interrupts import Descriptors, finish
from fastserial.targets import PathTarget

__all__ = ["Replacement", "temporary_name"]

_SLOTS = 10_000
_LOOKAHEAD = 8  # how many free names in a row end the search for leftovers
_NAME_MAX = 255  # bytes,
_CHARACTER_MAX = 4  # of which a character takes up to so many
# What file systems say that have no locks, or cannot sync a directory.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_NO_DIRECTORY_SYNC = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
# We may not give files away, or the owner does not exist in this user namespace (container).
_NO_SUCH_OWNER = (errno.EPERM, errno.EACCES, errno.EINVAL)
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.ENOSYS)


def temporary_name(name: str, slot: int) -> str:
    """Return the temporary name number `slot` of the file `name` (without its directory)."""
    suffix = f".fastserial-{slot}.tmp"
    room = _NAME_MAX - len(suffix) - 1
    if len(name) > room // _CHARACTER_MAX:
        name = os.fsdecode(os.fsencode(name)[:room])
    return f".{name}{suffix}"


@functools.lru_cache(maxsize=64)
def _first_names(name: str) -> tuple[str, ...]:
    """Return the temporary names of a file that every save looks for."""
    return tuple([temporary_name(name, slot) for slot in range(_LOOKAHEAD)])


@functools.cache
def _can_link() -> bool:
    """Return whether a nameless file can be given a name later: that takes /proc."""
    return os.path.isdir("/proc/self/fd")


def _lock(fd: int) -> bool:
    """Lock a temporary file; False if another process has. True where there are no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return True
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


class Replacement:
    """A new file on its way to a target: `fd` is its descriptor until `commit` or `discard`.

    Attributes:
        committed: the new file is at the target.
        fallback: what the file system could not do, or None.
    """

    def __init__(self, target: PathTarget, durable: bool) -> None:
        """Create the file, empty and not yet visible at the target.

        Raises:
            OSError: it cannot be created (no permission, no space, read-only file system, ...).
        """
        self.target = target
        self.durable = durable
        self.named: str | None = None
        self.committed = False
        self.fallback: str | None = None
        self.fd = -1
        self._files = Descriptors()  # the directory's, and `fd`
        self._replaced: Descriptors | None = None
        directory, self._base = os.path.split(target.path)
        freeing.wait_until_free()
        self._directory = self._files.open(directory or os.curdir, os.O_RDONLY | os.O_DIRECTORY)
        try:
            # A nameless file gets a temporary name only where it replaces another.
            self._sweep(_LOOKAHEAD if target.mode is not None else 1)
            self.fd = self._create()
            self._copy_attributes()
        except BaseException:
            self.discard()
            raise

    def _create(self) -> int:
        if not _can_link():
            return self._create_named()
        try:
            return self._files.open(".", os.O_RDWR | os.O_TMPFILE, dir_fd=self._directory)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
            return self._create_named()

    def _create_named(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        self._sweep(_LOOKAHEAD)
        for name in self._names():
            self.named = name  # first: an interrupt may come right after the file is there
            try:
                fd = self._files.open(name, flags, dir_fd=self._directory)
            except FileExistsError:
                continue
            # Until it is locked, another save may take it for a leftover.
            if _lock(fd) and self._is(name, fd):
                return fd
            self._files.close(but=1)
        self.named = None
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))

    def _names(self) -> Iterator[str]:
        base = self._base
        first = _first_names(base)
        later = range(len(first), _SLOTS)
        return chain(first, (temporary_name(base, slot) for slot in later))

    def _sweep(self, look: int) -> None:
        """Remove what killed processes left of this target, so that its space is free again.

        Does nothing if there is none of the first `look` temporary names.
        """
        if not any(map(self._exists, _first_names(self._base)[:look])):
            return
        free = 0
        for name in self._names():
            if self._exists(name):
                self._remove_stale(name)
                free = 0
            else:
                free += 1
            if free == _LOOKAHEAD:
                return

    def _exists(self, name: str) -> bool:
        return os.access(  # far cheaper than a `stat` that raises
            name, os.F_OK, dir_fd=self._directory, effective_ids=True, follow_symlinks=False
        )

    def _is(self, name: str, fd: int) -> bool:
        try:
            there = os.stat(name, dir_fd=self._directory, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(there, os.fstat(fd))

    def _remove_stale(self, name: str) -> None:
        """Remove a temporary file unless its owner is alive."""
        files = Descriptors()
        try:
            # Over NFS an exclusive lock takes a descriptor that can write.
            fd = files.open(name, os.O_RDWR | os.O_NOFOLLOW, dir_fd=self._directory)
        except OSError:
            return
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is(name, fd):
                    os.unlink(name, dir_fd=self._directory)
        except OSError:  # locked: its owner is alive
            pass
        finally:
            files.close()

    def _copy_attributes(self) -> None:
        """Give the new file the mode and, where we may, the owner of the one it replaces."""
        owner, mode = self.target.owner, self.target.mode
        if owner is None or mode is None:
            return
        made = os.fstat(self.fd)
        same_owner = (made.st_uid, made.st_gid) == owner
        if not same_owner:
            try:
                os.fchown(self.fd, *owner)
            except OSError as error:
                if error.errno not in _NO_SUCH_OWNER:
                    raise
        if not same_owner or stat.S_IMODE(made.st_mode) != mode:  # a new owner may clear bits
            os.fchmod(self.fd, mode)

    def sync(self) -> None:
        """Put data and metadata on the device, if the save is to be durable."""
        if self.durable:
            os.fsync(self.fd)
        elif self.named is not None:
            # network file systems report late errors at a close; in one call, as `interrupts` says
            list(map(os.close, map(os.dup, (self.fd,))))

    def commit(self) -> None:
        """Make the file the target, and the change of name durable. `sync` comes before.

        Raises:
            OSError: the target is still the old file, unless only the last sync failed.
        """
        if self.named is not None or not self._link_as_target():
            named = self.named or self._link()
            base, directory = self._base, self._directory
            self._hold(base)
            os.rename(named, base, src_dir_fd=directory, dst_dir_fd=directory)
        self.named = None
        self.committed = True
        if self.durable:
            self._sync_directory()
        self._close()

    def _hold(self, base: str) -> None:
        """Keep a large old file's space allocated until the new one is safe: see `freeing`."""
        if self.target.size >= freeing.LARGE:
            self._replaced = Descriptors()
            with contextlib.suppress(OSError):
                self._replaced.open(base, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._directory)

    def _sync_directory(self) -> None:
        try:
            os.fsync(self._directory)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_SYNC:
                raise
            self.fallback = "the file system cannot sync a directory"

    def _link_as_target(self) -> bool:
        """Give the nameless file the target's name, if no file has it."""
        if self.target.mode is not None:
            return False
        try:
            self._name(self._base)
        except FileExistsError:  # made since the save began
            return False
        return True

    def _name(self, name: str) -> None:
        """Give the nameless file a name."""
        source = f"/proc/self/fd/{self.fd}"
        os.link(source, name, dst_dir_fd=self._directory, follow_symlinks=True)

    def _link(self) -> str:
        """Give the nameless file a temporary name and return it."""
        _lock(self.fd)
        for name in self._names():
            self.named = name  # first: an interrupt may come right after the link is there
            try:
                self._name(name)
            except FileExistsError:
                self.named = None
                continue
            return name
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))

    def discard(self) -> None:
        """Throw the new file away. Idempotent; does nothing after `commit`."""
        finish(self._remove_name, self._close)

    def _remove_name(self) -> None:
        if self.named is not None:
            with contextlib.suppress(OSError):
                if self._is(self.named, self._files.newest):
                    os.unlink(self.named, dir_fd=self._directory)
            self.named = None

    def _close(self) -> None:
        self.fd = -1
        finish(self._files.close)
        if self._replaced is not None:
            freeing.free(self._replaced)
