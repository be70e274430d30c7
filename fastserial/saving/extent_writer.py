"""Writes extents of a layout to a file: little data through the page cache, more of it in blocks.

The extents may be any of a layout, in any order, and the file one that was opened elsewhere: N
writers, in one process or in several, write one file together (`clip` cuts a layout up). What
needs checksums that other writers know is written once their ledgers are merged into one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from fastserial import trace
from fastserial.checksums import CrcLedger
from fastserial.config import Config
from fastserial.files.linux import Compression, compression_of
from fastserial.formats.extents import Data, Extent
from fastserial.memory.held_settings import paused_collection
from fastserial.memory.storages import StorageMemory
from fastserial.memory.transfers import on_host
from fastserial.reports import HOST_ONLY, Transfer
from fastserial.saving.block_writer import BlockWriter
from fastserial.saving.buffered import write_buffered
from fastserial.saving.fill import Part
from fastserial.saving.tally import Tally

__all__ = ["ExtentWriter"]


class ExtentWriter:
    """Writes extents to one descriptor, which stays the caller's.

    Raises the `OSError` of the first write that failed; then only `close` may follow.
    """

    def __init__(
        self,
        fd: int,
        config: Config,
        on_progress: Callable[[int], None] | None = None,
        may_be_locked: bool = False,
        owner: object = None,
    ) -> None:
        """Start without an engine.

        Args:
            fd: of a file open for writing.
            config: the options.
            on_progress: called with the bytes of each piece that is written.
            may_be_locked: others know the file and may hold a `lockf` lock on it.
            owner: kept as long as the descriptor is written to.
        """
        self.tally = Tally()
        self._fd = fd
        self._config = config
        self._on_progress = on_progress
        self._may_be_locked = may_be_locked
        self._owner = owner
        self._expected: int | None = None
        self._nbytes = 0
        self._blocks: BlockWriter | None = None
        self._transfer = on_host(config)

    @property
    def transfer(self) -> Transfer:
        """The transfer type taken, and why."""
        blocks = self._blocks
        return self._transfer if blocks is None or blocks.transfer == HOST_ONLY else blocks.transfer

    @property
    def engine_name(self) -> str:
        """The engine in use, or `buffered` as long as there was no need for one."""
        return self._blocks.engine_name if self._blocks is not None else "buffered"

    @property
    def direct(self) -> bool:
        """Whether direct I/O is used."""
        return self._blocks is not None and self._blocks.direct

    @property
    def fallback(self) -> str | None:
        """Why the bytes do not go the fastest way, or None."""
        return self._blocks.fallback if self._blocks is not None else None

    @property
    def submit_seconds(self) -> list[float]:
        """Latencies from queueing a block until its transfer starts."""
        return self._blocks.submit_seconds if self._blocks is not None else []

    @property
    def complete_seconds(self) -> list[float]:
        """Latencies of the transfers themselves."""
        return self._blocks.complete_seconds if self._blocks is not None else []

    @functools.cached_property
    def compression(self) -> Compression | None:
        """How the file system compresses the file; None: not, or the user wants direct I/O."""
        return None if self._config.direct is True else compression_of(self._fd)

    def expect(self, nbytes: int) -> None:
        """Tell how many bytes there will be, as far as known."""
        self._expected = nbytes

    def write(
        self, extents: Iterable[Extent], ledger: CrcLedger | None = None, base: int = 0
    ) -> None:
        """Write extents; their memory must stay as it is until `release_sources` or `finish`.

        Args:
            extents: fastest in file order. A late one comes after what it needs, unless the
                ledger knows its checksums already.
            ledger: of the layout's checksums.
            base: place in the file of the layout's first byte (bytes).
        """
        with paused_collection():
            parts = [
                Part(base + extent.offset, extent.source, extent.start, extent.length, ledger)
                for extent in extents
            ]
        places = {
            part.source.memory.device
            for part in parts
            if type(part.source) is Data and type(part.source.memory) is StorageMemory
        }
        nbytes = sum([part.length for part in parts])
        self._nbytes += nbytes
        config, blocks = self._config, self._blocks
        large = self._nbytes > config.small_file or config.direct is True
        if blocks is None and large:
            blocks = self._blocks = BlockWriter(
                self._fd,
                config,
                tally=self.tally,
                on_progress=self._on_progress,
                expected=self._expected,
                may_be_locked=self._may_be_locked,
                compression=self.compression,
                owner=self._owner,
            )
        if blocks is not None:
            if places:
                blocks.join(places)
            with trace.step("cut into blocks"):
                for part in parts:
                    blocks.put(part)
            return
        if places:
            self._transfer = Transfer("cpu_gpu", "a small file")
        write_buffered(self._fd, parts)
        self.tally.add_plain(parts)
        if self._on_progress is not None:
            self._on_progress(nbytes)

    def start(self) -> None:
        """Let the engine begin with all full blocks, instead of when there is no buffer left."""
        if self._blocks is not None:
            self._blocks.start()

    def release_sources(self) -> None:
        """Wait until no memory given so far is needed any more, but for `bytes` objects."""
        if self._blocks is not None:
            self._blocks.release_sources()

    def finish(self) -> None:
        """Wait until everything is written."""
        if self._blocks is not None:
            self._blocks.finish()

    def close(self) -> None:
        """Stop the engine and free the buffers, waiting only for writes under way. Idempotent."""
        if self._blocks is not None:
            self._blocks.close()
