"""Replacing a file as a whole: the target is the old file or the new one, never between.

The new file is made without a name (`O_TMPFILE`) where the file system can, so that a killed
process leaves nothing; elsewhere under a temporary name beside the target. It gets the attributes
of the old one before the first byte; where it cannot, torch writes the file. Then: sync
the file, give it the temporary name, rename it over the target, sync the directory.

Temporary names are numbered per target. Whoever owns one holds a lock (`flock`) on it, so a name
nobody locks was left by a killed process, and the next save to the target removes it.
`docs/guide/durability.md` says what each step guarantees.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import stat
from collections.abc import Iterator
from time import perf_counter

from fastserial import trace
from fastserial.config.performance import LARGE_FILE
from fastserial.files import linux
from fastserial.files.attributes import Attributes, CannotReplace, attributes_of, give
from fastserial.files.targets import PathTarget
from fastserial.interrupts import Background, Descriptors, finish
from fastserial.reasons import RENAMES, Reason

__all__ = ["Replacement", "free", "temporary_name", "wait_until_free"]

_SLOTS = 10_000
_LOOKAHEAD = 8  # how many free names in a row end the search for leftovers
_NAME_MOST = 100  # bytes: with the suffix, too, no file system finds it too long
# What file systems say that have no locks.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# No new file for us: a security module, or an owner that an idmapped mount does not know.
_NOT_FOR_US = (errno.EPERM, errno.EACCES, errno.EOVERFLOW)
_NO_TMPFILE = (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL, errno.ENOSYS)
_CHANGED = "during the save it got an owner or attributes that a new file cannot have; save again"
_freeing_threads = Background()


TEMPORARY_NAME = r"(?s)\..+\.fastserial-\d+\.tmp"  # a pattern of all that `temporary_name` returns


def temporary_name(name: str, slot: int) -> str:
    """Return the temporary name number `slot` of the file `name` (without its directory)."""
    return f".{os.fsdecode(os.fsencode(name)[:_NAME_MOST])}.fastserial-{slot}.tmp"


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


_LOCAL = "save to a local disk, if the file must survive a power cut"


class Replacement:
    """A new file on its way to a target: `fd` is its descriptor until `commit` or `discard`.

    Attributes:
        committed: the new file is at the target.
        fallback: what the file system could not do, or None.
    """

    start = 0
    shared = False  # nobody knows it yet

    def __init__(self, target: PathTarget, durable: bool, named: bool = False) -> None:
        """Create the file, empty and not yet visible at the target.

        Args:
            durable: sync the file and its directory.
            named: under a temporary name from the start, by which other processes can open it.

        Raises:
            CannotReplace: no new file may take this one's place. Nothing is left behind.
            OSError: it cannot be created (no space, read-only file system, ...).
        """
        self.target = target
        self.name, self.where = target.name, target.where
        self.began = perf_counter()
        self.durable = durable
        self.named: str | None = None
        self._wants_name = named
        self.committed = False
        self.fallback: Reason | None = None
        self.fd = -1
        there = target.there
        self._seen = there if there is not None and stat.S_ISREG(there.st_mode) else None
        self._files = Descriptors()  # the directory's, and `fd`
        self._replaced: Descriptors | None = None
        self._directory = -1
        self._base = os.path.basename(target.path)
        try:
            self._directory = self._files.open(target.where, os.O_RDONLY | os.O_DIRECTORY)
            # a nameless file gets a temporary name only where it replaces another
            self._sweep(1 if target.there is None else _LOOKAHEAD)
            if linux.is_append_only(self._directory):  # neither renamed nor removed, ever
                raise CannotReplace("nothing in an append-only directory can be replaced", RENAMES)
            self._kept = self._attributes()
            self.fd = self._create()
            if self._kept is not None:
                give(self.fd, self._kept)
        except BaseException:
            self.discard()
            raise

    def _attributes(self) -> Attributes | None:
        """Return the attributes of the file to be replaced, None if there is none by now."""
        if self._seen is None:
            return None
        try:
            return attributes_of(self._seen, self.target.path)
        except FileNotFoundError:
            return None

    def _status(self) -> os.stat_result | None:
        """Return the status of the file to be replaced, None if there is none."""
        try:
            found = os.stat(self._base, dir_fd=self._directory, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return found if stat.S_ISREG(found.st_mode) else None

    def _create(self) -> int:
        try:
            return self._create_nameless()
        except OSError as error:
            if error.errno not in _NOT_FOR_US:
                raise
            text = f"no new file can be made beside it ({error.strerror})"
            raise CannotReplace(text) from error

    def _create_nameless(self) -> int:
        if self._wants_name or not _can_link():
            return self._create_named()
        # Nobody can open a file without a name, and its permissions are set before the first byte.
        mode = 0o666 if self._kept is None else self._kept.mode & 0o777
        try:
            return self._files.open(".", os.O_RDWR | os.O_TMPFILE, mode, self._directory)
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise
            return self._create_named()

    def _create_named(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        self._sweep(_LOOKAHEAD)
        mode = 0o666 if self._kept is None else 0o600
        for name in self._names():
            self.named = name  # first: an interrupt may come right after the file is there
            try:
                fd = self._files.open(name, flags, mode, self._directory)
            except FileExistsError:
                continue
            # Until it is locked, another save may take it for a leftover.
            if _lock(fd) and self._is(name, fd):
                return fd
            self._files.close(but=1)
        self.named = None
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))

    def _names(self, count: int = _SLOTS) -> Iterator[str]:
        return (temporary_name(self._base, slot) for slot in range(count))

    def _sweep(self, look: int) -> None:
        """Remove what killed processes left of this target, so that its space is free again.

        Does nothing if there is none of the first `look` temporary names.
        """
        if not any(map(self._exists, self._names(look))):
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
        # far cheaper than a `stat` that raises; a container's filter may refuse flags (faccessat2)
        return os.access(name, os.F_OK, dir_fd=self._directory)

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

    @property
    def outcome(self) -> str:
        """What an error has left at the path."""
        if self.committed:
            return "the new file is in place, but a power cut may bring the old one back"
        return self.target.outcome

    def begin(self) -> None:
        """Wait for the space of files that were replaced before: now it may be needed."""
        wait_until_free()

    @trace.traced("fsync")
    def sync(self) -> None:
        """Put data and metadata on the device, if the save is to be durable."""
        if self.durable:
            if not linux.synced(self.fd):
                self.durable = False
                self.fallback = Reason("the file system cannot sync a file", _LOCAL)
        elif self.named is not None:
            # network file systems report late errors at a close; in one call, as `interrupts` says
            list(map(os.close, map(os.dup, (self.fd,))))

    @trace.traced("rename")
    def commit(self) -> None:
        """Make the file the target, and the change of name durable. `sync` comes before.

        Raises:
            OSError: the target is still the old file, unless only the last sync failed.
        """
        nameless = self.named is None
        if not nameless or not self._link_as_target():
            self._keep_up()
            named = self.named or self._link()
            base, directory = self._base, self._directory
            self._hold(base)
            os.rename(named, base, src_dir_fd=directory, dst_dir_fd=directory)
        self.named = None
        self.committed = True
        if self.durable:
            self._sync_directory()
        if nameless:
            self._announce()
        self._close()

    def _keep_up(self) -> None:
        """Give the new file what was changed at the old one since: a `chmod 600`, say."""
        now = self._status()
        if now is None:
            return
        try:
            found = attributes_of(now, self.target.path)
            if found == self._kept:
                return
            give(self.fd, found)
        except FileNotFoundError:
            return
        except CannotReplace as error:
            raise OSError(errno.EPERM, _CHANGED) from error
        self.sync()

    def _announce(self) -> None:
        """Let those who watch the directory see the file closed, as they do when torch writes it.

        They see the last `close` of a file without a name under a number, such as `#12`.
        """
        files = Descriptors()
        with contextlib.suppress(OSError):
            files.open(
                self._base, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self._directory
            )
        finish(files.close)

    def _hold(self, base: str) -> None:
        """Keep a large old file's space allocated until the new one is safe: see `free`."""
        if self._seen is not None and self._seen.st_size >= LARGE_FILE:
            self._replaced = Descriptors()
            with contextlib.suppress(OSError):
                self._replaced.open(base, os.O_PATH | os.O_NOFOLLOW, dir_fd=self._directory)

    @trace.traced("directory sync")
    def _sync_directory(self) -> None:
        if not linux.synced(self._directory):
            self.fallback = Reason("the file system cannot sync a directory", _LOCAL)

    def _link_as_target(self) -> bool:
        """Give the nameless file the target's name, if no file has it."""
        if self.target.there is not None:
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
            free(self._replaced)


def free(files: Descriptors) -> None:
    """Close a descriptor that is the last to hold a file; on a thread if the file is large."""
    try:
        large = files.newest >= 0 and os.fstat(files.newest).st_size >= LARGE_FILE
    except OSError:
        large = False
    if not large or not _freeing_threads.start(files.close):
        files.close()


def wait_until_free() -> None:
    """Wait for the files that this process replaced before."""
    if _freeing_threads:
        _freeing_threads.join()


def _forget_freeing() -> None:
    global _freeing_threads  # they are the parent's
    _freeing_threads = Background()


os.register_at_fork(after_in_child=_forget_freeing)
