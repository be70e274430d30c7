"""Sources of parsers: bytes at any offset of a file, of a part of one, or in memory."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO, Protocol

from fastserial.config.performance import STREAM_CHUNK
from fastserial.errors import (
    CheckpointFileError,
    CorruptCheckpointError,
    PickleLimitError,
    TruncatedCheckpointError,
    UnreadableCheckpointError,
)
from fastserial.files.linux import preadv
from fastserial.interrupts import Descriptors, ours


class Source(Protocol):
    """Bytes that can be read at any offset: the only view that a parser has of a file.

    source = BytesSource(b"PK...")
    source.read_at(0, 2)  # b"PK"
    """

    @property
    def size(self) -> int:
        """How many bytes there are."""

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset` on.

        Raises:
            TruncatedCheckpointError: there are fewer.
            OSError: they cannot be read.
        """


class DescriptorSource:
    """A file that is open, or a part of it. The descriptor's position is not used."""

    def __init__(self, fd: int, start: int = 0, size: int | None = None) -> None:
        """Read from a descriptor, which its owner closes.

        Args:
            start: offset of byte 0 in the file.
            size: bytes of the part; by default it ends where the file does.
        """
        self._fd = fd
        self._start = start
        self._size = os.fstat(fd).st_size - start if size is None else size

    @property
    def size(self) -> int:
        """How many bytes there are."""
        return self._size

    @property
    def mode(self) -> int:
        """Its type, as `os.stat` has it in `st_mode`: a descriptor may be that of a folder."""
        return os.fstat(self._fd).st_mode

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset` on.

        Raises:
            TruncatedCheckpointError: there are not as many.
            OSError: they cannot be read.
        """
        _refuse_outside(offset, nbytes, self._size)
        return read_exactly(self._fd, self._start + offset, nbytes)

    def has_only_zeros(self) -> bool:
        """Return whether every byte is zero, as a power cut leaves a file. Holes are not read.

        Raises:
            OSError: they cannot be read.
        """
        at = 0
        while at < self._size:
            nbytes = min(STREAM_CHUNK, self._size - at)
            if os.pread(self._fd, nbytes, self._start + at).strip(b"\0"):
                return False
            at = self._after_hole(at + nbytes)
        return True

    def _after_hole(self, offset: int) -> int:
        """Return the first offset from one on that is in no hole; the size if all is one."""
        try:
            return os.lseek(self._fd, self._start + offset, os.SEEK_DATA) - self._start
        except ours(OSError) as error:
            return self._size if error.errno == errno.ENXIO else offset


def is_path(name: str) -> bool:
    """Return whether the system can be asked for a path of this name."""
    try:
        return bool(name) and "\0" not in name and bool(os.fsencode(name))
    except UnicodeEncodeError:  # a lone surrogate
        return False


def read_regular(path: str) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        UnreadableCheckpointError: it is something else: reading a pipe may block for ever.
        OSError: it cannot be read.
    """
    with Descriptors() as files:
        source = DescriptorSource(files.open(path, os.O_RDONLY | os.O_NONBLOCK))
        if not stat.S_ISREG(source.mode):
            raise UnreadableCheckpointError("not a regular file", path=path)
        return source.read_at(0, source.size)


class BytesSource:
    """Bytes in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def size(self) -> int:
        """How many bytes there are."""
        return len(self._data)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset` on.

        Raises:
            TruncatedCheckpointError: there are not as many.
        """
        _refuse_outside(offset, nbytes, len(self._data))
        return self._data[offset : offset + nbytes]


class ObjectSource:
    """A seekable file object, of which a reader moves the position."""

    def __init__(self, file: BinaryIO, start: int) -> None:
        """Read from a file object, which its owner closes.

        Args:
            start: offset of byte 0 in the file.

        Raises:
            OSError, ValueError: it cannot be moved.
        """
        self._file = file
        self._start = start
        self._size = file.seek(0, os.SEEK_END) - start

    @property
    def size(self) -> int:
        """How many bytes there are."""
        return self._size

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes from `offset` on.

        Raises:
            TruncatedCheckpointError: there are not as many.
            OSError, ValueError: they cannot be read.
        """
        _refuse_outside(offset, nbytes, self._size)
        self._file.seek(self._start + offset)
        parts = []
        while nbytes:
            parts.append(self._file.read(nbytes))
            if not parts[-1]:
                raise TruncatedCheckpointError(f"the file ends before byte {self._size}: truncated")
            nbytes -= len(parts[-1])
        return b"".join(parts)


def _refuse_outside(offset: int, nbytes: int, size: int) -> None:
    if offset < 0 or nbytes < 0 or offset + nbytes > size:
        raise TruncatedCheckpointError(f"the file ends at byte {size}: truncated")


def read_exactly(fd: int, offset: int, length: int) -> bytes:
    """Return `length` bytes at `offset` of an open file.

    Raises:
        TruncatedCheckpointError: the file ends before.
        OSError: the file cannot be read.
    """
    data = os.pread(fd, length, offset)
    if len(data) == length:
        return data
    whole = bytearray(length)  # a signal, or a file system that reads in small pieces
    read_to(memoryview(whole), fd, offset)
    return bytes(whole)


def read_to(view: memoryview, fd: int, offset: int) -> None:
    """Fill host memory from byte `offset` of an open file on.

    Raises:
        TruncatedCheckpointError: the file ends before.
        OSError: the file cannot be read.
    """
    done = 0
    while done < len(view):
        got = preadv(fd, [view[done:]], offset + done)
        if not got:
            raise TruncatedCheckpointError(f"the file ends at byte {offset + done}: truncated")
        done += got


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Add the file's path to an error of the body that has none."""
    try:
        yield
    except ours(CheckpointFileError) as error:
        error.path = error.path or path
        raise
    except ours(PickleLimitError) as error:
        error.path = error.path or path
        raise


_LONGEST_LINE = 64 * 1024


class ByteStream:
    """Bytes [start, end) of a source, in chunks.

    Attributes:
        chunk: the bytes read last; those from `at` on come next. `at` may be past its end.
    """

    def __init__(self, source: Source, start: int = 0, end: int | None = None) -> None:
        """Begin at byte `start`; without `end` the stream ends where the source does."""
        self._source = source
        self._end = source.size if end is None else end
        self._offset = start  # of the chunk's first byte
        self.chunk = b""
        self.at = 0

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._offset + self.at

    def expect(self, length: int) -> None:
        """Raise if there are not `length` more bytes.

        Raises:
            CorruptCheckpointError: there are not as many.
        """
        if self.tell() + length > self._end:
            raise CorruptCheckpointError("the pickle ends too early", offset=self._end)

    def load_chunk(self, length: int) -> None:
        """Make the chunk begin with the next `length` bytes, and `at` zero.

        Raises:
            CorruptCheckpointError: there are not as many.
        """
        self.expect(length)
        offset = self.tell()
        size = min(max(length, STREAM_CHUNK), self._end - offset)
        self.chunk = self._source.read_at(offset, size)
        self._offset, self.at = offset, 0

    def read(self, length: int) -> bytes:
        """Return the next `length` bytes.

        Raises:
            CorruptCheckpointError: there are not as many.
        """
        at = self.at
        if at + length > len(self.chunk):
            self.load_chunk(length)
            at = 0
        self.at = at + length
        return self.chunk[at : at + length]

    def skip(self, length: int) -> None:
        """Skip `length` bytes.

        Raises:
            CorruptCheckpointError: there are not as many.
        """
        self.expect(length)
        self.at += length

    def readline(self) -> bytes:
        """Return the bytes up to the next newline, which is included.

        Raises:
            CorruptCheckpointError: there is no newline within 64 KiB.
        """
        found = self.chunk.find(b"\n", self.at, self.at + _LONGEST_LINE)
        if found < 0:
            self.load_chunk(min(_LONGEST_LINE, self._end - self.tell()))
            found = self.chunk.find(b"\n", 0, _LONGEST_LINE)
            if found < 0:
                raise CorruptCheckpointError("a line of the pickle has no end", offset=self.tell())
        data = self.chunk[self.at : found + 1]
        self.at = found + 1
        return data
