"""CRC-32s of ranges of a file, in one pass over it at the speed of the disk."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Sequence
from dataclasses import replace

from fastserial.checksums import CrcLedger, crc32
from fastserial.config import Config
from fastserial.config.performance import STREAM_CHUNK
from fastserial.errors import CorruptCheckpointError, TransferAbandonedError
from fastserial.formats.source import BytesSource, DescriptorSource, Source
from fastserial.loading.reader import FastFileReader
from fastserial.loading.sinks import ReadExtent

__all__ = ["FilePart", "Span"]

Span = tuple[int, int]  # the first byte, and how many


class FilePart:
    """All bytes of an open file, or some: one checkpoint.

    Attributes:
        source: the bytes.
    """

    def __init__(
        self, fd: int, name: str, config: Config, start: int = 0, size: int | None = None
    ) -> None:
        """Take `size` bytes from byte `start` on; what is no larger than a block is read at once.

        Args:
            fd: the file's descriptor, which its owner closes.
            name: its path, for errors.
            config: block size, queue depth and threads.

        Raises:
            TruncatedCheckpointError: the file ends before.
        """
        self._fd, self._name, self._start = fd, name, start
        # any file can be verified, whatever engine is configured for saves
        self._config = replace(config, engine="threads", cache="drop", small_file=0)
        self.source: Source = DescriptorSource(fd, start, size)
        self._is_small = self.source.size <= config.block_size
        if self._is_small:
            with contextlib.suppress(OSError):  # then it is read record by record
                self.source = BytesSource(self.source.read_at(0, self.source.size))

    def checksums(self, spans: Sequence[Span]) -> list[int | OSError | None]:
        """Return the CRC-32 of each span, an error if it cannot be read, None if it is cut short.

        Args:
            spans: in the order of the file, without overlaps.
        """
        end = max((start + nbytes for start, nbytes in spans), default=0)
        found = _Checksums(spans)
        try:
            if self._is_small:
                found.deliver(memoryview(self.source.read_at(0, end)), 0, 0)
            else:
                with FastFileReader(self._fd, self._config, self._name) as reader:
                    reader.read_into([ReadExtent(self._start, end, found)])
        except CorruptCheckpointError:  # it became shorter
            pass
        except OSError:
            return [self._alone(start, nbytes) for start, nbytes in spans]
        return [found.crc_of(index) for index in range(len(spans))]

    def _alone(self, start: int, nbytes: int) -> int | OSError | None:
        """Return the CRC-32 of a span of a file some of which cannot be read."""
        crc = 0
        try:
            for at in range(start, start + nbytes, STREAM_CHUNK):
                length = min(STREAM_CHUNK, start + nbytes - at)
                crc = crc32(self.source.read_at(at, length), crc)
        except CorruptCheckpointError:
            return None
        except OSError as error:
            return error
        return crc


class _Checksums:
    """A sink of all bytes from the first on, in any order, on several threads."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._starts = [start for start, _ in spans]
        self._ledger = CrcLedger([nbytes for _, nbytes in spans], [None] * len(spans))

    def deliver(self, view: memoryview, address: int, start: int) -> None:
        end = start + len(view)
        index = max(0, bisect.bisect_right(self._starts, start) - 1)
        while index < len(self._spans) and self._starts[index] < end:
            begin, nbytes = self._spans[index]
            first, last = max(start, begin), min(end, begin + nbytes)
            if first < last:
                part = view[first - start : last - start]
                self._ledger.add(index, first - begin, len(part), crc32(part))
            index += 1

    def place(self, start: int, length: int) -> None:
        return None

    def crc_of(self, index: int) -> int | None:
        self._ledger.fail()  # no more bytes will arrive
        try:
            return self._ledger.wait(index) if self._spans[index][1] else 0
        except TransferAbandonedError:
            return None
