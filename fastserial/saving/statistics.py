"""The statistics of DeepSpeed's FastFileWriter, for those who read them from ours.

The names are DeepSpeed's, and so are the units: bytes, seconds, and "GB/s" for GiB per second.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TransferTally", "WriterStatistics"]

GiB = 1024**3


@dataclass(slots=True)
class TransferTally:
    """What became of the blocks of one file. Sizes are bytes.

    Attributes:
        direct_bytes: written past the page cache by the engine.
        cached_bytes: written through it (the rest of the last page, small files).
        cached_seconds: spent on that.
        blocks: how many were filled.
        fill_seconds: spent filling them, summed over threads.
    """

    direct_bytes: int = 0
    cached_bytes: int = 0
    cached_seconds: float = 0.0
    blocks: int = 0
    fill_seconds: float = 0.0


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

        Args:
            path: the file.
            nbytes: bytes given to the writer.
            seconds: time the caller spent writing them.
        """
        tally = self.tally
        direct_seconds = max(0.0, seconds - tally.cached_seconds) if tally.direct_bytes else 0.0
        return {
            "close": self.close,
            "fileno": self.fileno,
            "flush": self.flush,
            "write": self.write,
            "bytes": nbytes,
            "write_secs": seconds,
            "write_GB/s": _rate(nbytes, seconds),
            "aio_write_secs": direct_seconds,
            "aio_bytes": tally.direct_bytes,
            "aio_GB/s": _rate(tally.direct_bytes, direct_seconds),
            "slow_bytes": tally.cached_bytes,
            "slow_write_secs": tally.cached_seconds,
            "fill_buffer_count": tally.blocks,
            "fill_buffer_secs": tally.fill_seconds,
            "fill_buffer_GB/s": _rate(nbytes, tally.fill_seconds),
            "save_storage": self.storages,
            "save_storage_bytes": self.storage_bytes,
            "path": path,
        }


def _rate(nbytes: int, seconds: float) -> float:
    return nbytes / seconds / GiB if seconds > 0 else 0.0
