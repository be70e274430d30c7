"""A folder of checkpoints, one file for each step: which there are, and which may go."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import weakref
from collections.abc import Collection, Iterator

from fastserial.errors import CheckpointFileError, ConfigError
from fastserial.formats.source import DescriptorSource
from fastserial.formats.zip.directory import read_directory

__all__ = ["CheckpointFolder"]

_NAME = re.compile(r"step-(\d{8,})\.pt")
# What a killed save leaves where the file system cannot make a file without a name.
_LEFTOVER = re.compile(r"\.step-\d{8,}\.pt\.fastserial-\d+\.tmp")
_LOCK = ".fastserial.lock"
_TRIES = 100  # to lock what has its name: where a file's number changes (FUSE), none succeeds


class CheckpointFolder:
    """Files `step-00000100.pt` in a folder. Nothing else in it is looked at, or touched."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock: _Lock | None = None

    def lock(self) -> None:
        """Keep other processes from saving here until `unlock`, or until this process ends.

        A file system without locks keeps nobody out.

        Raises:
            ConfigError: another process saves here.
        """
        path = os.path.join(os.path.realpath(self.path), _LOCK)
        self._lock = _locks.get(path)
        if self._lock is None:
            self._lock = _locks[path] = _Lock(path)

    def unlock(self) -> None:
        """End `lock`. Idempotent."""
        self._lock = None

    def file(self, step: int) -> str:
        """Return the path of a step's checkpoint, whether it is there or not."""
        return os.path.join(self.path, f"step-{step:08d}.pt")

    def steps(self) -> list[int]:
        """Return the steps of which there is a file, the last one first.

        Raises:
            OSError: the folder cannot be read.
        """
        found = [
            int(match[1])
            for entry in self._entries()
            if (match := _NAME.fullmatch(entry.name)) and entry.is_file()
        ]
        return sorted(found, reverse=True)

    def dangling(self) -> list[str]:
        """Return the links called like a checkpoint that lead to no file."""
        return sorted(
            entry.path
            for entry in self._entries()
            if _NAME.fullmatch(entry.name) and entry.is_symlink() and not entry.is_file()
        )

    def written_later(self, step: int) -> list[int]:
        """Return the earlier steps whose files were written after this step's: another run's."""
        times = {}
        for found in self.steps():
            with contextlib.suppress(OSError):  # gone by now
                times[found] = os.stat(self.file(found)).st_mtime_ns
        mine = times.get(step)
        return [found for found, time in times.items() if mine and found < step and time > mine]

    def sizes(self) -> dict[int, int]:
        """Return the bytes of the files by their steps.

        Raises:
            OSError: the folder cannot be read.
        """
        found = {}
        for step in self.steps():
            with contextlib.suppress(OSError):  # gone by now
                found[step] = os.path.getsize(self.file(step))
        return found

    def is_complete(self, step: int) -> bool:
        """Tell whether a file has its end, which says where everything in it is."""
        try:
            fd = os.open(self.file(step), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            read_directory(DescriptorSource(fd), headers=False)
        except (OSError, CheckpointFileError):
            return False
        finally:
            os.close(fd)
        return True

    def prune(
        self, step: int, keep: int, damaged: Collection[int] = (), stale: Collection[int] = ()
    ) -> None:
        """Remove all but the last `keep` checkpoints.

        Args:
            step: the one that was just written, which stays. Later ones are of another run, and
                stay, too.
            keep: how many.
            damaged: those that do not count, and stay.
            stale: those that another run left, and that go first.

        Raises:
            OSError: a file cannot be removed.
        """
        good = [found for found in self.steps() if found <= step and found not in damaged]
        good.sort(key=lambda found: found in stale)
        for old in good[max(1, keep) :]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.file(old))

    def sweep(self) -> None:
        """Remove what killed saves left; what another process is writing is locked, and stays."""
        for entry in list(self._entries()):
            if _LEFTOVER.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_unlocked(entry.path)

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        try:
            with os.scandir(self.path) as entries:
                yield from entries
        except FileNotFoundError:
            return


def _remove_unlocked(path: str) -> None:
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(found, os.lstat(path)):
                os.unlink(path)
    finally:
        os.close(fd)


class _Lock:
    """A file in the folder, locked (`flock`) as long as this object or the process lives.

    It is removed at the end. Whoever finds it after a crash takes it over.
    """

    def __init__(self, path: str) -> None:
        """Take the lock.

        Raises:
            ConfigError: another process has it.
        """
        fd = _locked(path)
        self.release = None if fd is None else weakref.finalize(self, _unlock, fd, path)


_locks: weakref.WeakValueDictionary[str, _Lock] = weakref.WeakValueDictionary()


def _locked(path: str) -> int | None:
    """Return the lock file's descriptor; None where files cannot be locked."""
    for _ in range(_TRIES):
        fd = _open_lock(path)
        if fd is None:
            return None
        kept = False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            kept = os.path.samestat(os.fstat(fd), os.lstat(path))
        except BlockingIOError:
            raise ConfigError(
                f"{os.path.dirname(path)}: {_owner(fd)} saves checkpoints in this folder, and each "
                "would remove the other's. Give each run its own folder, or end that process"
            ) from None
        except FileNotFoundError:  # another process has just let it go
            continue
        except OSError:
            return None
        finally:
            if not kept:
                os.close(fd)
        if kept:
            with contextlib.suppress(OSError):  # it only says who
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()} on {os.uname().nodename}".encode(), 0)
            return fd
    return None


def _open_lock(path: str) -> int | None:
    """Open the lock file, which may be another user's that crashed."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    for access in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):
        with contextlib.suppress(OSError):
            return os.open(path, flags | access, 0o666)
    return None


def _owner(fd: int) -> str:
    text = b""
    with contextlib.suppress(OSError):
        text = os.pread(fd, 300, 0)
    return f"process {text.decode(errors='replace')}" if text else "another process"


def _unlock(fd: int, path: str) -> None:
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(fd), os.lstat(path)):
            os.unlink(path)
    os.close(fd)


def _leave_to_parent() -> None:
    """Close the locks in a forked child: it would keep them when the parent has crashed."""
    for lock in list(_locks.values()):
        found = lock.release.detach() if lock.release is not None else None
        if found is not None:
            os.close(found[2][0])
    _locks.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
