"""The statistics of DeepSpeed's FastFileWriter, for those who read them from ours.

The names are DeepSpeed's, and so are the units: bytes, seconds, and "GB/s" for GiB per second.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastserial.formats.extents import Hole

if TYPE_CHECKING:
    from fastserial.saving.fill import Part

__all__ = ["TransferTally", "WriterStatistics"]

GiB = 1024**3
_UNITED_EACH = 1024  # spans: they take no memory that grows with the file


@dataclass(slots=True)
class TransferTally:
    """What became of the blocks of one file. Sizes are bytes.

    Attributes:
        engine_bytes: written by the engine.
        spans: when transfers of the engine were under way, in seconds on `time.perf_counter`.
        plain_bytes: written without it (the rest of the last page, small files).
        plain_seconds: spent on that.
        skipped_bytes: holes that were not written.
        blocks, filled_bytes: how many blocks were filled, with so many bytes.
        fill_seconds: spent filling them, summed over threads.
    """

    engine_bytes: int = 0
    spans: list[tuple[float, float]] = field(default_factory=list)
    plain_bytes: int = 0
    plain_seconds: float = 0.0
    skipped_bytes: int = 0
    blocks: int = 0
    filled_bytes: int = 0
    fill_seconds: float = 0.0

    def add_span(self, start: float, end: float) -> None:
        """Count a transfer of the engine."""
        self.spans.append((start, end))
        if len(self.spans) % _UNITED_EACH == 0:
            self._unite()

    def _unite(self) -> None:
        """Make one span of those that overlap: of a large file there are few then."""
        united: list[tuple[float, float]] = []
        for start, end in sorted(self.spans):
            if united and start <= united[-1][1]:
                start, end = united[-1][0], max(end, united.pop()[1])
            united.append((start, end))
        self.spans = united

    @property
    def engine_seconds(self) -> float:
        """Seconds in which at least one transfer of the engine was under way."""
        self._unite()
        return sum(end - start for start, end in self.spans)

    def add_plain(self, parts: Iterable[Part], seconds: float, fill_holes: bool = False) -> None:
        """Count parts that were written without the engine, their holes only if they were, too."""
        for part in parts:
            if not fill_holes and type(part.source) is Hole:
                self.skipped_bytes += part.length
            else:
                self.plain_bytes += part.length
        self.plain_seconds += seconds


@dataclass(slots=True)
class WriterStatistics:
    """Calls of one writer, and what became of its blocks."""

    tally: TransferTally
    close: int = 0
    fileno: int = 0
    flush: int = 0
    write: int = 0
    storages: int = 0
    storage_bytes: int = 0

    def count_storages(self, count: int, nbytes: int) -> None:
        """Note storages that were handed over."""
        self.storages += count
        self.storage_bytes += nbytes
        self.write += count

    def as_dict(self, path: str, nbytes: int, seconds: float) -> dict[str, int | float | str]:
        """Return what DeepSpeed's `_dump_state` prints.

        The engine fills and writes blocks at the same time, and beside the caller: these seconds
        need not add up to `write_secs`.

        Args:
            path: the file.
            nbytes: bytes given to the writer, without those left out.
            seconds: time the caller spent writing them.
        """
        tally = self.tally
        engine_seconds = tally.engine_seconds
        return {
            "close": self.close,
            "fileno": self.fileno,
            "flush": self.flush,
            "write": self.write,
            "bytes": nbytes,
            "write_secs": seconds,
            "write_GB/s": _rate(nbytes, seconds),
            "aio_write_secs": engine_seconds,
            "aio_bytes": tally.engine_bytes,
            "aio_GB/s": _rate(tally.engine_bytes, engine_seconds),
            "slow_bytes": tally.plain_bytes,
            "slow_write_secs": tally.plain_seconds,
            "fill_buffer_count": tally.blocks,
            "fill_buffer_secs": tally.fill_seconds,
            "fill_buffer_GB/s": _rate(tally.filled_bytes, tally.fill_seconds),
            "save_storage": self.storages,
            "save_storage_bytes": self.storage_bytes,
            "path": path,
        }


def _rate(nbytes: int, seconds: float) -> float:
    return nbytes / seconds / GiB if seconds > 0 else 0.0
