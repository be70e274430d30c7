"""FastFileWriter: a file whose bytes reach the disk in batched asynchronous direct I/O.

The protocol is that of DeepSpeed's FastPersist (arXiv 2406.13768): a writable file object with
`save_torch_storage_object_list`, which takes all storages of a checkpoint in one call.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO

from fastserial import config as config_module
from fastserial import filesystem
from fastserial.checksums import CrcLedger
from fastserial.commit import Replacement
from fastserial.config import Config
from fastserial.containers.extents import Extent, Hole, Literal, total_length
from fastserial.containers.legacy import storage_extents
from fastserial.containers.zip import ZipPlan
from fastserial.errors import WriteError, write_error
from fastserial.progress import progress_bar
from fastserial.report import Latency, SaveReport, publish
from fastserial.staging import storage_memory, synchronize
from fastserial.targets import FileTarget, PathTarget, StockWay, file_target, path_target
from fastserial.transfer import BlockWriter

if TYPE_CHECKING:
    import torch

__all__ = ["FastFileWriter"]

_log = logging.getLogger("fastserial")
_GATHER = 64 * 1024  # small writes are gathered up to this many bytes
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FastFileWriter:
    """A writable binary file, for `torch.save(obj, writer)` or by itself.

    A path is replaced as a whole when the writer is closed: until then, and after an error, the
    previous file is there. A file object of the caller's is written from its position on, and
    positioned at the end of what was written. Leaving a `with` block by an exception discards.
    """

    def __init__(
        self,
        target: str | os.PathLike[str] | BinaryIO | PathTarget | FileTarget,
        config: Config | None = None,
    ) -> None:
        """Open a writer.

        Args:
            target: a path, or an open plain file on a regular file.
            config: options; by default those in force (`install`, `options`, environment).

        Raises:
            WriteError: the target cannot be written (it is an `OSError` and a `RuntimeError`).
        """
        self._closed = True  # until there is something to close
        if not isinstance(target, PathTarget | FileTarget):
            target = _resolve(target)
        self._target = target
        self._config = config if config is not None else config_module.current()
        self._pid = os.getpid()
        self._began = perf_counter()
        self._phases: dict[str, float] = {}
        self._container = "raw"
        self._replacement: Replacement | None = None
        self._size_before: int | None = None
        self._needed: int | None = None
        self._report: SaveReport | None = None
        with self._translated():
            if isinstance(target, PathTarget):
                self._replacement = Replacement(target, self._config.durable)
                self._fd, self._start = self._replacement.fd, 0
            else:
                self._fd, self._start = target.fd, target.offset
        self._bar = progress_bar(self._config.progress, target.name)
        self._blocks = BlockWriter(self._fd, self._start, self._config, self._bar.update)
        self._gathered = bytearray()
        self._closed = False

    # -- a file object -------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The target's path as given, or the name of the file object."""
        return self._target.name

    @property
    def mode(self) -> str:
        """Always `wb`."""
        return "wb"

    @property
    def closed(self) -> bool:
        """Whether the writer was closed or discarded."""
        return self._closed

    @property
    def report(self) -> SaveReport | None:
        """What the save did, once the writer is closed."""
        return self._report

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def fileno(self) -> int:
        """Refuse: writes through a descriptor would pass by what is staged.

        Raises:
            io.UnsupportedOperation: always.
        """
        raise io.UnsupportedOperation("fileno")

    def tell(self) -> int:
        """Return how many bytes were written so far."""
        return self._blocks.position - self._start + len(self._gathered)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append bytes and return how many. They are copied or written before it returns."""
        self._check_open()
        with memoryview(data).cast("B") as view:
            length = len(view)
            if length < _GATHER:
                self._gathered += view
                if len(self._gathered) >= _GATHER:
                    self._gather()
                return length
            with self._guarded():
                self._gather()
                self._blocks.put(Literal(data if isinstance(data, bytes) else view))
                if not isinstance(data, bytes):
                    self._blocks.settle()
        return length

    def flush(self) -> None:
        """Do nothing: bytes reach the file in whole blocks, the last ones at `close`."""
        self._check_open()

    def save_torch_storage_object_list(
        self,
        storage_obj_list: Sequence[tuple[torch.UntypedStorage, torch.dtype]],
        save_size: bool = True,
    ) -> None:
        """Append storages, as the legacy format wants them.

        Args:
            storage_obj_list: storages with the dtype of their elements.
            save_size: put the number of elements before each (int64, little-endian).

        Raises:
            WriteError: the disk is full or failed.
        """
        self._check_open()
        synchronize([storage for storage, _ in storage_obj_list])
        extents = storage_extents(
            [(storage_memory(storage), dtype.itemsize) for storage, dtype in storage_obj_list],
            self.tell(),
            save_size,
        )
        self._write_extents(extents, None)
        self.settle()

    def write_plan(self, plan: ZipPlan) -> None:
        """Append a whole zip archive. The storages must stay as they are until `close`.

        Raises:
            WriteError: the disk is full or failed.
        """
        self._check_open()
        self._write_extents(plan.extents, CrcLedger(plan.sizes, plan.crcs))

    def settle(self) -> None:
        """Return when no storage given so far is needed any more.

        Raises:
            WriteError: the disk is full or failed.
        """
        with self._guarded():
            self._blocks.settle()

    def close(self) -> None:
        """Write the rest, sync, and put the new file in its place. Idempotent.

        Raises:
            WriteError: the disk is full or failed; the previous file is intact.
        """
        if self._closed:
            return
        with self._guarded():
            self._gather()
            began = perf_counter()
            self._phases.setdefault("serialize", began - self._began)
            self._blocks.finish()
            written = perf_counter()
            self._phases["transfer"] = self._phases.get("transfer", 0.0) + written - began
            self._blocks.close()
            if self._replacement is not None:
                self._replacement.sync()
                synced = perf_counter()
                self._replacement.commit()
                self._phases["sync"] = synced - written
                self._phases["commit"] = perf_counter() - synced
            elif isinstance(self._target, FileTarget):
                self._target.file.seek(self._blocks.position)
        self._closed = True
        self._bar.close()
        self._publish()

    def abort(self) -> None:
        """Discard what was written; a path keeps its previous file. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return  # a forked child must not touch what its parent is writing
        self._blocks.close()
        self._bar.close()
        if self._replacement is not None:
            self._replacement.discard()
        elif self._size_before is not None:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size_before)

    def __enter__(self) -> FastFileWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        if not self._closed:
            self.abort()
            warnings.warn(
                f"a FastFileWriter for {self.name} was never closed; nothing was saved",
                ResourceWarning,
                stacklevel=2,
                source=self,
            )

    # -- the rest ------------------------------------------------------------------------------

    def label(self, container: str) -> None:
        """Name the container for the report."""
        self._container = container

    def _write_extents(self, extents: Sequence[Extent], ledger: CrcLedger | None) -> None:
        began = perf_counter()
        self._phases.setdefault("serialize", began - self._began)
        with self._guarded():
            self._gather()
            self._reserve(extents)
            for extent in extents:
                self._blocks.put(extent.source, ledger)
        self._phases["transfer"] = self._phases.get("transfer", 0.0) + perf_counter() - began

    def _reserve(self, extents: Sequence[Extent]) -> None:
        """Reserve space for all that is known to come, unless it is little or has holes."""
        more = total_length(extents)
        self._needed = self._blocks.position - self._start + more
        self._bar.expect(self._needed)
        config = self._config
        if not config.preallocate or self._needed <= config.small_file or config.engine == "null":
            return
        if any(type(extent.source) is Hole for extent in extents):
            return
        if self._replacement is None:
            self._size_before = os.fstat(self._fd).st_size
        filesystem.preallocate(self._fd, self._start, self._needed)

    def _gather(self) -> None:
        if self._gathered:
            gathered, self._gathered = bytes(self._gathered), bytearray()
            self._blocks.put(Literal(gathered))

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("I/O operation on closed file.")

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Discard everything on an error, and translate it."""
        with self._translated():
            try:
                yield
            except BaseException:
                self.abort()
                raise

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except WriteError:
            raise
        except OSError as error:
            number = error.errno or errno.EIO
            raise write_error(number, self._target.name, self._explain(number, error)) from error

    def _explain(self, number: int, error: OSError) -> str:
        text = error.strerror or str(error)
        kept = "the previous file is intact" if self._replacement else "the save is incomplete"
        if number in _FULL and self._needed is not None:
            text += f" (the save needs {self._needed} bytes{_free(self._target)})"
            return f"{text}; {kept}. Free space there or save to another disk"
        return f"{text}; {kept}"

    def _publish(self) -> None:
        blocks, config = self._blocks, self._config
        report = SaveReport(
            path=self.name,
            container=self._container,
            bytes=blocks.position - self._start,
            seconds=perf_counter() - self._began,
            engine=blocks.engine_name,
            direct=blocks.direct,
            durable=self._replacement is not None and config.durable,
            fallback=blocks.fallback,
            block_size=config.block_size,
            queue_depth=config.queue_depth,
            threads=config.threads,
            phases=self._phases,
            submit=Latency.of(blocks.submit_seconds),
            complete=Latency.of(blocks.complete_seconds),
        )
        self._report = report
        publish(report)
        _log.info("%s", report)
        if config.on_report is not None:
            try:
                config.on_report(report)
            except Exception:  # the file is safe: this must not look like a failed save
                _log.exception("on_report failed for %s", self.name)


def _resolve(target: str | os.PathLike[str] | BinaryIO) -> PathTarget | FileTarget:
    found: PathTarget | FileTarget | StockWay
    if isinstance(target, str | os.PathLike):
        name = os.fspath(target)
        found = path_target(name)
    else:
        name = repr(target)
        found = file_target(target)
    if isinstance(found, StockWay):
        raise write_error(errno.EINVAL, name, f"a FastFileWriter cannot write this: {found.reason}")
    return found


def _free(target: PathTarget | FileTarget) -> str:
    if isinstance(target, PathTarget):
        with contextlib.suppress(OSError):
            stats = os.statvfs(os.path.dirname(target.path))
            return f", {stats.f_bavail * stats.f_frsize} are free"
    return ""
