"""The file that a load reads, whether it has changed since, and which files only torch can read."""

from __future__ import annotations

import io
import os
import stat
from typing import Any, BinaryIO, NamedTuple

from fastserial.interrupts import ours

_METHODS = frozenset({"fileno", "read", "readinto", "seek", "tell"})


class FileSource(NamedTuple):
    """An open regular file.

    Attributes:
        name: its path, or what the file object calls itself.
        file: the Python file that torch reads from.
        fd: its descriptor.
        start: its position when it was passed to us (bytes).
        size: bytes of the file.
        stamp: its state then.
    """

    name: str
    file: BinaryIO
    fd: int
    start: int
    size: int
    stamp: FileStamp

    def is_unchanged(self) -> bool:
        """Return whether the file was not written to since then, as far as is known."""
        return self.stamp.holds_for(self.fd)


def file_source(file: Any, small: int) -> FileSource | None:
    """Return a file object as a source if its descriptor shows what its `read` would give.

    Of files of more than `small` bytes the ends are recorded, to find out later whether they
    changed.
    """
    raw = plain_file(file, (io.BufferedReader, io.BufferedRandom), _METHODS)
    if raw is None:
        return None
    try:
        fd = raw.fileno()
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or not raw.readable():
            return None
        if isinstance(raw, io.BufferedRandom):
            raw.flush()
        start = raw.tell()
        seen = stamp(fd, found, ends=found.st_size > small)
    except ours(OSError, ValueError):
        return None
    return FileSource(file_name(raw, fd), file, fd, start, found.st_size, seen)


def plain_file(file: Any, kinds: tuple[type, ...], methods: frozenset[str]) -> Any:
    """Return the plain Python file that a file object is, or None if it may be something else.

    Args:
        file: subclasses and wrappers may change the bytes; of these, only
            the files of fsspec's local file system are known.
        kinds: what is accepted in addition to `io.FileIO`.
        methods: names of those that must not have been replaced.
    """
    kind = type(file)
    opener = (kind.__module__, kind.__name__) == ("fsspec.implementations.local", "LocalFileOpener")
    if not opener and kind not in (*kinds, io.FileIO):
        return None
    if not methods.isdisjoint(vars(file)):
        return None
    if opener:
        return plain_file(file.f, kinds, methods)
    return file if kind is io.FileIO or type(file.raw) is io.FileIO else None


def file_name(file: Any, fd: int) -> str:
    """Return what a file object calls itself: its path, or the number of its descriptor."""
    name = getattr(file, "name", None)
    return name if isinstance(name, str) else f"<fd {fd}>"


_END_BYTES = 4096


class FileStamp(NamedTuple):
    """The state of a file: device and inode, bytes, time (ns), its first and last bytes.

    A time alone proves nothing: programs that keep scratch folders alive touch files, and some FUSE
    file systems report the current time. A checkpoint that was overwritten differs in its first or
    last bytes: a zip's end holds the CRC-32 of an id made from all of its records' CRCs. `ends` is
    empty where only the size is to be compared.
    """

    identity: tuple[int, int]
    size: int
    modified: int
    ends: tuple[bytes, ...] = ()

    def holds_for(self, fd: int) -> bool:
        """Return whether a file has not changed since, as far as is known."""
        found = os.fstat(fd)
        if ((found.st_dev, found.st_ino), found.st_size) != (self.identity, self.size):
            return False
        if found.st_mtime_ns == self.modified or not self.ends:
            return True
        try:
            return _ends(fd, self.size) == self.ends
        except ours(OSError):  # a bad disk is no proof of a change
            return True


def stamp(fd: int, found: os.stat_result | None = None, ends: bool = True) -> FileStamp:
    """Return the current state of an open file.

    Args:
        fd: its descriptor; positions are not used.
        found: its status, if it is known.
        ends: read its first and last bytes, too, if it is a regular file.

    Raises:
        OSError: it cannot be read.
    """
    found = found or os.fstat(fd)
    size = found.st_size
    parts = _ends(fd, size) if ends and stat.S_ISREG(found.st_mode) else ()
    return FileStamp((found.st_dev, found.st_ino), size, found.st_mtime_ns, parts)


def _ends(fd: int, size: int) -> tuple[bytes, ...]:
    return os.pread(fd, _END_BYTES, 0), os.pread(fd, _END_BYTES, max(0, size - _END_BYTES))
