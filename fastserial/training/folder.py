"""A folder of checkpoints, one file for each step, and the lock of the process that saves there."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import os
import re
import stat
import string
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from fastserial.errors import CheckpointFileError, ConfigError
from fastserial.formats.source import DescriptorSource
from fastserial.formats.zip_format import read_directory

# What a killed save leaves on a file system without unnamed files (O_TMPFILE).
_LEFTOVER = re.compile(r"\.(.+)\.fastserial-\d+\.tmp")
_LOCK = ".fastserial.lock"


class CheckpointFolder:
    """Files such as `step-00000100.pt` in a folder. Other files there are ignored."""

    def __init__(self, path: str, name: str) -> None:
        """Name the files.

        Args:
            path: of the folder.
            name: of a file, with `{step}` for the step, as in `str.format`.

        Raises:
            ConfigError: the name does not distinguish steps.
        """
        self.path = path
        self._name = name
        self._pattern = _pattern(name)
        self._lock: weakref.finalize[Any, CheckpointFolder] | None = None

    def lock(self) -> None:
        """Create the folder, and keep others from saving here until `unlock`.

        The lock ends with this process, too. On a file system without locks it has no effect. It
        is not inherited by a forked child.

        Raises:
            ConfigError: another process, or another object of this process, saves here.
            OSError: the folder cannot be created.
        """
        os.makedirs(self.path, exist_ok=True)
        if self._lock is not None and self._lock.alive:
            return
        path = os.path.join(os.path.realpath(self.path), _LOCK)
        try:
            fd = _open_lock(path)
        except ConfigError:
            gc.collect()  # what has it may be unreachable
            fd = _open_lock(path)
        if fd is not None:
            self._lock = weakref.finalize(self, os.close, fd)
            _locked.add(self)

    def unlock(self) -> None:
        """End `lock`. Idempotent."""
        if self._lock is not None:
            self._lock()

    def file(self, step: int) -> str:
        """Return the path of a step's checkpoint, whether it exists or not."""
        return os.path.join(self.path, self.name(step))

    def name(self, step: int) -> str:
        """Return the name of a step's checkpoint in the folder."""
        return self._name.format(step=step)

    def step_of(self, name: str) -> int | None:
        """Return the step in the name of a file; None if it is another file."""
        match = self._pattern.fullmatch(name)
        step = int(match[1]) if match else None
        return step if step is not None and self.name(step) == name else None

    def steps(self) -> list[int]:
        """Return the steps that have a file, the last one first.

        Raises:
            OSError: the folder cannot be read.
        """
        found = [
            step
            for entry in self._entries()
            if (step := self.step_of(entry.name)) is not None and entry.is_file()
        ]
        return sorted(found, reverse=True)

    def written_at(self, step: int) -> float | None:
        """Return when a step's file was written (`time.time`); None if it no longer exists."""
        try:
            return os.stat(self.file(step)).st_mtime
        except OSError:
            return None

    def sizes(self) -> dict[int, int]:
        """Return the sizes of the files by their steps (bytes).

        Raises:
            OSError: the folder cannot be read.
        """
        found = {}
        for step in self.steps():
            with contextlib.suppress(OSError):  # it no longer exists
                found[step] = os.path.getsize(self.file(step))
        return found

    def is_complete(self, step: int) -> bool:
        """Return whether a file is not truncated: the directory of the archive is at its end."""
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

    def remove(self, steps: Iterable[int]) -> None:
        """Remove checkpoints; of a symbolic link only the link.

        Raises:
            OSError: a file cannot be removed.
        """
        for step in steps:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.file(step))

    def sweep(self) -> None:
        """Remove what killed saves left; files that other processes write are locked, and stay."""
        for entry in list(self._entries()):
            match = _LEFTOVER.fullmatch(entry.name)
            if match and self.step_of(match[1]) is not None:
                with contextlib.suppress(OSError):
                    _remove_unlocked(entry.path)

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        try:
            with os.scandir(self.path) as entries:
                yield from entries
        except FileNotFoundError:
            return


def _pattern(name: str) -> re.Pattern[str]:
    """Return a pattern that finds the step in the names of files."""
    try:
        parts = list(string.Formatter().parse(name))
        fields = [field for _, field, _, _ in parts if field is not None]
        is_usual = fields == ["step"] and os.path.basename(name) == name and name.format(step=7)
    except (ValueError, KeyError, IndexError):
        is_usual = False
    if not is_usual or is_usual == name.format(step=8):
        raise ConfigError(
            'name must be that of a file with one {step} in it, such as "step-{step:08d}.pt", '
            f"not {name!r}"
        )
    digits = {None: "", "step": r"(\d+)"}
    return re.compile("".join(re.escape(text) + digits[field] for text, field, _, _ in parts))


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


_locked: weakref.WeakSet[CheckpointFolder] = weakref.WeakSet()


def _open_lock(path: str) -> int | None:
    """Return the lock file's descriptor, locked; None where files cannot be locked.

    The file is never removed: another process may have just opened it.

    Raises:
        ConfigError: it is locked.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except OSError:
        try:
            fd = os.open(path, os.O_RDONLY | flags)  # it belongs to another user
        except OSError:
            return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(fd, 300, 0).decode(errors="replace")
        os.close(fd)
        owner, end = f"process {text}" if text else "another process", "end that process"
        if text == _owner():
            owner, end = "another Checkpointer of this process", "call its `close()`"
        raise ConfigError(
            f"{os.path.dirname(path)}: {owner} saves checkpoints in this folder, and each would "
            f"remove the other's. Give each run its own folder, or {end}"
        ) from None
    except OSError:
        os.close(fd)
        return None
    with contextlib.suppress(OSError):  # it only names the owner
        os.ftruncate(fd, 0)
        os.pwrite(fd, _owner().encode(), 0)
    return fd


def _owner() -> str:
    return f"{os.getpid()} on {os.uname().nodename}"


def _leave_to_parent() -> None:
    """Close the locks in a forked child: it would keep them when the parent has crashed."""
    for folder in list(_locked):
        folder.unlock()


os.register_at_fork(after_in_child=_leave_to_parent)
