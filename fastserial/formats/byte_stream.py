"""Bytes of a source, one after the other, in chunks."""

from __future__ import annotations

from fastserial.config.performance import STREAM_CHUNK
from fastserial.errors import CorruptCheckpointError
from fastserial.formats.source import Source

__all__ = ["ByteStream"]

_LONGEST_LINE = 64 * 1024


class ByteStream:
    """Bytes [start, end) of a source, in chunks.

    Attributes:
        chunk: what was read last; its bytes from `at` on come next. `at` may be past its end.
    """

    def __init__(self, source: Source, start: int = 0, end: int | None = None) -> None:
        """Begin at byte `start`; without `end` it goes to that of the source."""
        self._source = source
        self._end = source.size if end is None else end
        self._offset = start  # of the chunk's first byte
        self.chunk = b""
        self.at = 0

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._offset + self.at

    def load_chunk(self, length: int) -> None:
        """Make the chunk begin with the next `length` bytes, and `at` zero.

        Raises:
            CorruptCheckpointError: there are not as many.
        """
        offset = self.tell()
        if offset + length > self._end:
            raise CorruptCheckpointError("the pickle ends too early", offset=self._end)
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
        """Pass over `length` bytes.

        Raises:
            CorruptCheckpointError: there are not as many.
        """
        if self.tell() + length > self._end:
            raise CorruptCheckpointError("the pickle ends too early", offset=self._end)
        self.at += length

    def line(self) -> bytes:
        """Return the bytes up to the next newline, which is passed over.

        Raises:
            CorruptCheckpointError: there is no newline within 64 KiB.
        """
        found = self.chunk.find(b"\n", self.at, self.at + _LONGEST_LINE)
        if found < 0:
            self.load_chunk(min(_LONGEST_LINE, self._end - self.tell()))
            found = self.chunk.find(b"\n", 0, _LONGEST_LINE)
            if found < 0:
                raise CorruptCheckpointError("a line of the pickle has no end", offset=self.tell())
        data = self.chunk[self.at : found]
        self.at = found + 1
        return data
