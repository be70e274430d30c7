"""A folder of checkpoints, one file for each step: which there are, and which may go."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Collection, Iterator

from fastserial.errors import CorruptCheckpointError
from fastserial.formats.zip.directory import read_directory

__all__ = ["CheckpointFolder"]

_NAME = re.compile(r"step-(\d{8,})\.pt")
# What a killed save leaves where the file system cannot make a file without a name.
_LEFTOVER = re.compile(r"\.step-\d{8,}\.pt\.fastserial-\d+\.tmp")


class CheckpointFolder:
    """Files `step-00000100.pt` in a folder. Nothing else in it is looked at, or touched."""

    def __init__(self, path: str) -> None:
        self.path = path

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
            if (match := _NAME.fullmatch(entry.name)) and entry.is_file(follow_symlinks=False)
        ]
        return sorted(found, reverse=True)

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
            read_directory(fd, os.fstat(fd).st_size, headers=False)
        except (OSError, CorruptCheckpointError):
            return False
        finally:
            os.close(fd)
        return True

    def prune(self, step: int, keep: int, damaged: Collection[int] = ()) -> None:
        """Remove all but the last `keep` checkpoints.

        Args:
            step: the one that was just written, which stays. Later ones are of another run, and
                stay, too.
            keep: how many.
            damaged: those that do not count, and stay.

        Raises:
            OSError: a file cannot be removed.
        """
        good = [found for found in self.steps() if found <= step and found not in damaged]
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
