"""What a load reads from: a regular file, or something only torch can read."""

from __future__ import annotations

import io
import os
import stat
from dataclasses import dataclass
from typing import Any, BinaryIO

from fastserial.files.file_stamp import FileStamp, stamp

__all__ = ["FileSource", "file_source"]

_METHODS = frozenset({"fileno", "read", "readinto", "seek", "tell"})


@dataclass(frozen=True, slots=True)
class FileSource:
    """An open regular file.

    Attributes:
        name: its path, or what the file object calls itself.
        file: the Python file that torch reads from.
        fd: its descriptor.
        start: where it stood when it was handed over (bytes).
        size: bytes of the file.
        stamp: what it was like then.
    """

    name: str
    file: BinaryIO
    fd: int
    start: int
    size: int
    stamp: FileStamp

    def is_unchanged(self) -> bool:
        """Tell whether nobody wrote to the file since it was handed over, as far as is known."""
        return self.stamp.holds_for(self.fd)


def file_source(file: Any, small: int) -> FileSource | None:
    """Return a file object as a source if its descriptor shows what its `read` would give.

    Subclasses and wrappers may change the bytes, so only plain files and what fsspec's local file
    system hands out are taken. Of files of more than `small` bytes the ends are noted, to tell
    later whether they changed.
    """
    raw = _raw_file(file)
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
    except (OSError, ValueError):
        return None
    name = getattr(raw, "name", None)
    text = name if isinstance(name, str) else f"<fd {fd}>"
    return FileSource(text, file, fd, start, found.st_size, seen)


def _raw_file(file: Any) -> Any:
    kind = type(file)
    if kind.__module__ == "fsspec.implementations.local" and kind.__name__ == "LocalFileOpener":
        return _raw_file(file.f)
    if kind in (io.BufferedReader, io.BufferedRandom):
        return file if _is_plain(file) and type(file.raw) is io.FileIO else None
    return file if kind is io.FileIO and _is_plain(file) else None


def _is_plain(file: Any) -> bool:
    return _METHODS.isdisjoint(vars(file))  # nobody put a method of his own in their place
