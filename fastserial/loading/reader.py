"""FastFileReader: extents of a file into memory, in batched asynchronous reads."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from fastserial.config import Config, current
from fastserial.errors import CorruptCheckpointError
from fastserial.files import linux
from fastserial.files.sources import FileStamp, file_name, stamp
from fastserial.formats.source import naming, read_to
from fastserial.interrupts import Descriptors, finish
from fastserial.loading.planner import plan_blocks
from fastserial.loading.pump import Pump, ReadCounts
from fastserial.loading.sinks import HostSink, ReadExtent
from fastserial.memory.storages import is_on_host, synchronize
from fastserial.progress import ProgressBar
from fastserial.reports import HOST_ONLY, LoadReport, Transfer, publish_load

if TYPE_CHECKING:
    import torch

    from fastserial.memory.buffers import Ring


class FastFileReader:
    """A regular file, open for reading at any offset.

    Bytes in the page cache are read through it, others with direct I/O, in blocks of `block_size`,
    `queue_depth` of them at once. For use by one thread at a time.
    """

    def __init__(
        self,
        source: str | os.PathLike[str] | BinaryIO | int,
        config: Config | None = None,
        name: str | None = None,
    ) -> None:
        """Open a file.

        Args:
            source: a path, or an open file or descriptor, which stays the caller's.
            config: options; by default those in force (`install`, `options`, environment).
            name: what to call it in errors and reports; by default its path.

        Raises:
            OSError: it cannot be opened, or is no regular file.
            EngineUnavailableError: the configured engine cannot read here.
        """
        self._closed = True  # until there is something to close
        self.config = config if config is not None else current()
        self._files = Descriptors()
        self.name, self.fd = _open(source, name, self._files)
        self._closed = False
        try:
            self._stamp = _stamp_of_file(self.fd, self.name)
            self.size = self._stamp.size
            self.bar = ProgressBar(self.name if self.config.progress else None)
            self.blocks = Pump(self.fd, self.size, self.config, self.bar.update, self._files)
        except BaseException:
            self._closed = True
            self._files.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether the reader was closed."""
        return self._closed

    @property
    def transfer(self) -> Transfer:
        """The transfer type that was used for devices, and why."""
        return self.blocks.transfer

    @property
    def ring(self) -> Ring | None:
        """The staging buffers of bytes for devices, after `attend`."""
        return self.blocks.ring

    def attend(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Prepare to fill storages, some of which may be on devices.

        They are filled after what the calling thread's current streams hold now.
        """
        away = [storage for storage in storages if not is_on_host(storage)]
        if not away:
            return
        from fastserial.memory.buffers import open_ring  # not without a device

        synchronize(away)  # for what does not pass through the ring
        devices = {storage.device for storage in away}
        blocks = self.blocks
        if blocks.ring is not None:
            blocks.join(devices)
            return
        ring, taken = open_ring(self.config, devices, blocks.takes_any_memory)
        blocks.stage_in(ring, devices, taken)

    def read_into(self, extents: Sequence[ReadExtent]) -> None:
        """Read extents, in the order of the file; returns when all have arrived.

        Raises once no read is in progress. After a failed read the reader reads no more.

        Raises:
            CorruptCheckpointError: an extent ends after the file does, or the file changed.
            OSError: the disk failed; `filename` names the file.
        """
        if self._closed:
            raise ValueError("I/O operation on closed file.")
        extents = [extent for extent in extents if extent.length]  # an empty one may lie anywhere
        for extent in extents:
            if extent.offset < 0 or extent.length < 0 or extent.offset + extent.length > self.size:
                raise CorruptCheckpointError(
                    f"{extent.length} bytes at {extent.offset} go past the end of the file "
                    f"({self.size} bytes)",
                    path=self.name,
                    offset=extent.offset,
                )
        self.bar.expect(sum(extent.length for extent in extents))
        with _translated(self.name):
            if extents:
                self._read(extents)
            self.check_unchanged()

    def _read(self, extents: Sequence[ReadExtent]) -> None:
        blocks = self.blocks
        first = min(extent.offset for extent in extents)
        stop = max(extent.offset + extent.length for extent in extents)
        blocks.expect(first, stop, sum(extent.length for extent in extents))
        try:
            blocks.read(plan_blocks(extents, blocks))
            if self.ring is not None:
                self.ring.settle()
        except BaseException:
            # No read may be in progress into memory that others use from here on: torch, which
            # reads into the same storages instead, or their owner.
            blocks.close()
            raise

    def check_unchanged(self) -> None:
        """Raise if the file was written to since it was opened.

        Raises:
            CorruptCheckpointError: its size is another, or its time of modification and its ends.
        """
        _refuse_changed(self._stamp, self.fd, self.name)

    def translated(self) -> contextlib.AbstractContextManager[None]:
        """Give errors of the body the file's name."""
        return _translated(self.name)

    def close(self) -> None:
        """Close the file, waiting only for reads in progress. Idempotent."""
        if self._closed:
            return
        self._closed = True
        finish(self.blocks.close, self.bar.close)
        self._files = Descriptors()  # closed after the last read from it

    def __enter__(self) -> FastFileReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class OccasionalReader:
    """A regular file that is read occasionally: between reads only its descriptor is kept.

    Calls are independent: threads, signal handlers and forked children may read at the same time.
    Few bytes are read by the caller's thread, more by a `FastFileReader` that ends with the call.
    """

    def __init__(self, path: str | os.PathLike[str], config: Config | None = None) -> None:
        """Open a file.

        Args:
            path: its path.
            config: options; by default those in force.

        Raises:
            OSError: it cannot be opened, or is no regular file.
        """
        self.name = os.fspath(path)
        self._config = config if config is not None else current()
        self._files: Descriptors | None = Descriptors()
        self.fd = self._files.open(self.name, os.O_RDONLY)
        self._stamp = _stamp_of_file(self.fd, self.name)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._files is None

    def read_into(self, extents: Sequence[ReadExtent]) -> None:
        """Read extents; returns when all have arrived.

        Raises:
            CorruptCheckpointError: the file changed since it was opened.
            OSError: the disk failed; `filename` names the file.
            ValueError: it is closed.
        """
        files = self._files  # stays open up to the end of this call
        if files is None:
            raise ValueError("I/O operation on closed file.")
        nbytes = sum(extent.length for extent in extents)
        sinks = [extent.sink for extent in extents]
        if nbytes <= self._config.small_file and all(isinstance(one, HostSink) for one in sinks):
            with _translated(self.name):
                for extent in extents:
                    buffer = extent.sink.memory_for(0, extent.length) if extent.length else None
                    if buffer is not None:
                        read_to(buffer.view, self.fd, extent.offset)
        else:
            with FastFileReader(self.fd, self._config, self.name) as reader:
                reader.read_into(extents)
        _refuse_changed(self._stamp, self.fd, self.name)

    def close(self) -> None:
        """Close the file, once reads in progress in other threads are done. Idempotent."""
        self._files = None


def _stamp_of_file(fd: int, name: str) -> FileStamp:
    """Return what identifies the present state of an open file.

    Raises:
        OSError: it is no regular file.
    """
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", name)
    return stamp(fd, found)


def _refuse_changed(before: FileStamp, fd: int, name: str) -> None:
    if not before.holds_for(fd):
        raise CorruptCheckpointError("the file changed while it was read", path=name)


@contextlib.contextmanager
def _translated(name: str) -> Iterator[None]:
    """Give errors of the body the file's name."""
    try:
        with naming(name):
            yield
    except OSError as error:
        if error.filename is not None:
            raise
        number = error.errno or errno.EIO
        raise OSError(number, error.strerror or str(error), name) from error


def _open(
    source: str | os.PathLike[str] | BinaryIO | int, name: str | None, files: Descriptors
) -> tuple[str, int]:
    """Return the name and a new descriptor of the file."""
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        return name or path, files.open(path, os.O_RDONLY)
    fd = source if isinstance(source, int) else source.fileno()
    text = name or file_name(source, fd)
    try:
        return text, linux.reopen(fd, os.O_RDONLY, files)
    except OSError:  # without /proc, or after privileges were dropped: positions are never used
        return text, files.duplicate(fd)


def report_load(
    counts: ReadCounts, config: Config, transfer: Transfer = HOST_ONLY, **rest: Any
) -> None:
    """Publish the report of a load.

    Args:
        counts: what was read.
        config: the options that it was read with.
        transfer: the transfer type that was used for devices.
        rest: the other fields of `LoadReport`.
    """
    from fastserial.memory.buffers import on_host  # rarely needed, and not at the start

    if transfer == HOST_ONLY:
        transfer = on_host(config)
    report = LoadReport(
        bytes=counts.direct + counts.cached,
        direct_bytes=counts.direct,
        cached_bytes=counts.cached,
        transfer=transfer.word,
        transfer_why=transfer.why,
        **rest,
    )
    publish_load(report, config.on_load)
