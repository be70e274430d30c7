"""CRC-32s of ranges of a file, in one pass over it at the speed of the disk."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from fastserial.checksums import CrcLedger, crc32
from fastserial.config import Config
from fastserial.config.performance import STREAM_CHUNK
from fastserial.errors import CorruptCheckpointError, TransferAbandonedError
from fastserial.formats.source import BytesSource, DescriptorSource, Source
from fastserial.loading.reader import CheckedSink, FastFileReader, ReadExtent

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
        if self._is_small:
            return [self._alone(start, nbytes) for start, nbytes in spans]
        ledger = CrcLedger([nbytes for _, nbytes in spans], [None] * len(spans))
        extents = [
            ReadExtent(self._start + start, nbytes, CheckedSink(None, ledger, index))
            for index, (start, nbytes) in enumerate(spans)
        ]
        try:
            with FastFileReader(self._fd, self._config, self._name) as reader:
                reader.read_into(extents)
        except CorruptCheckpointError:  # it became shorter
            ledger.fail()
        except OSError:
            return [self._alone(start, nbytes) for start, nbytes in spans]
        return [_crc_of(ledger, index) if nbytes else 0 for index, (_, nbytes) in enumerate(spans)]

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


def _crc_of(ledger: CrcLedger, index: int) -> int | None:
    try:
        return ledger.wait(index)
    except TransferAbandonedError:
        return None
