"""FastFileWriter: a file whose bytes reach the disk in batched asynchronous direct I/O.

The protocol is that of DeepSpeed's FastPersist (arXiv 2406.13768): a writable file object with
`save_torch_storage_object_list`, which takes all storages of a checkpoint in one call.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Any, BinaryIO

from fastserial.checksums import CrcLedger
from fastserial.config import PAST_HOST, Config, current
from fastserial.config.performance import GATHERED, GiB
from fastserial.errors import WriteError, name_in
from fastserial.files.destination import (
    CallersFile,
    Destination,
    Replacement,
    open_destination,
    required,
    save_error,
    wait_until_free,
)
from fastserial.files.linux import reserve
from fastserial.formats.extents import Extent, Literal, element_counts, renewed, storage_extents
from fastserial.formats.zip_layout import ZipPlan
from fastserial.interrupts import finish, finish_after, is_foreign, ours
from fastserial.memory.storages import storage_batch, synchronize
from fastserial.progress import ProgressBar
from fastserial.reports import SaveReport, SnapshotReport, publish_save
from fastserial.saving.extent_writer import ExtentWriter, Outcome
from fastserial.saving.small import SmallRecord, fill_by_torch

if TYPE_CHECKING:
    import torch

    from fastserial.engines.deepspeed.writer_config import WriterOptions
    from fastserial.saving.incremental import Base


def needs_name(config: Config) -> bool:
    """Return whether the new file of a save has a name from the start, by which cuFile opens it."""
    if config.transfer not in PAST_HOST:
        return False
    from fastserial.engines.gds import cufile  # rarely wanted

    return cufile.may_serve()


class FastFileWriter:
    """A writable binary file, for `torch.save(obj, writer)` or by itself.

        with fastserial.FastFileWriter("ckpt.pt") as file:
            torch.save(state, file)

    A path is replaced as a whole when the writer is closed: until then, and after an error, the
    previous file is there. A file object of the caller's is written from its position on, and
    positioned at the end of what was written. Leaving a `with` block by an exception discards, and
    so does a `torch.save` into the writer that fails: `close` then does nothing.
    """

    _closed = True  # until there is something to close
    snapshot: Callable[[], SnapshotReport] | None = None  # of a `save_async`, for the report
    base: Base | None = None  # an earlier file, from which what is the same is cloned

    def __init__(
        self,
        target: str | os.PathLike[str] | BinaryIO | Replacement | CallersFile | None = None,
        config: Config | WriterOptions | None = None,
        *,
        file_path: str | os.PathLike[str] | None = None,
        container: str = "raw",
    ) -> None:
        """Open a writer.

        Args:
            target: a path, or an open plain file on a regular file; or what `open_destination`
                made of one.
            config: options; by default those in force (`install`, `options`, environment). Also
                DeepSpeed's `FastFileWriterConfig`: its handle and buffer are used then.
            file_path: what DeepSpeed's FastFileWriter calls `target`.
            container: what the file will hold, for the report.

        Raises:
            WriteError: the target cannot be written (it is an `OSError` and a `RuntimeError`), or
                only by torch: no file can be replaced there, or it is no plain file.
            TypeError: neither or both of `target` and `file_path` are given.
        """
        if (target is None) is (file_path is None):
            raise TypeError("give a FastFileWriter one target")
        given: Any = target if target is not None else file_path
        if config is not None and not isinstance(config, Config):
            from fastserial.engines.deepspeed.writer_config import options_of  # rarely wanted

            config = options_of(config) if config.dnvme_handle is not None else None
        self._config = config if config is not None else current()
        self._pid = os.getpid()
        self._handled = sys.exc_info()[1]  # a writer may be opened where an error is handled
        self._phases = {"serialize": 0.0, "transfer": 0.0}
        self._container = container
        self._report: SaveReport | None = None
        if not isinstance(given, Replacement | CallersFile):
            found = open_destination(
                given,
                self._config.durable,
                named=needs_name(self._config),
                retry_seconds=self._config.retry_seconds,
            )
            given = required(found, given)
        self._wants_sync = self._config.durable
        if isinstance(given, CallersFile) and self._config.durable:
            self._config = replace(self._config, durable=False)  # the caller decides when to sync
        self._began = given.began
        self._begin(given)

    def _begin(self, destination: Destination) -> None:
        """Begin to write a destination, which is empty."""
        self._destination = destination
        self._bar = ProgressBar(self.name) if self._config.progress else None
        self.__dict__.pop("_out", None)
        self._expected: int | None = None  # bytes of the whole file, once they are known
        self._written = 0  # bytes passed on
        self._gathered = bytearray()
        self._closed = self._discarded = False
        self._failed = False  # discarded because of an error, which was raised

    @cached_property
    def _out(self) -> ExtentWriter:
        on_progress = bool if self._bar is None else self._bar.update
        destination = self._destination
        return ExtentWriter(destination.fd, self._config, on_progress, owner=destination)

    @property
    def _outcome(self) -> Outcome:
        made = "_out" in self.__dict__
        return self._out.outcome if made else Outcome(plain_bytes=self._written)

    # -- a file object -------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The target's path as given, or the name of the file object."""
        return self._destination.name

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

    def file_path(self) -> str:
        """Return the `name`; DeepSpeed's name for it."""
        return self.name

    def get_stats(self) -> dict[str, int | float | str]:
        """Return what DeepSpeed's FastFileWriter counts of the bytes, by its names.

        Bytes, seconds, and "GB/s" for GiB per second. `aio_bytes` are the engine's, `slow_bytes`
        those written without it. More is in `report`.
        """
        outcome, seconds = self._outcome, self._phases["transfer"]
        nbytes = self.tell()
        return {
            "path": self.name,
            "bytes": nbytes,
            "write_secs": seconds,
            "write_GB/s": nbytes / seconds / GiB if seconds else 0.0,
            "aio_bytes": outcome.engine_bytes,
            "slow_bytes": outcome.plain_bytes,
        }

    def _dump_state(self) -> None:
        """Print the statistics as DeepSpeed does; its checkpoint engine calls it by this name."""
        from fastserial.console import say  # rarely wanted

        say(f"stats = {self.get_stats()}")

    def readable(self) -> bool:
        return False

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def fileno(self) -> int:
        """Refuse: writes through a descriptor would bypass the staging buffers.

        Raises:
            io.UnsupportedOperation: always.
        """
        raise io.UnsupportedOperation("fileno")

    def tell(self) -> int:
        """Return how many bytes were written so far."""
        return self._written + len(self._gathered)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append bytes and return how many. They are copied or written before it returns."""
        if self._failed and _error_torch_handles() is not None:
            return memoryview(data).nbytes  # the end of an archive that failed: nobody wants it
        self._check_open()
        with memoryview(data).cast("B") as view:
            try:
                self._append(data, view)
            except BaseException as error:  # of a signal handler, too: bytes may be missing
                self.fail(error)
                raise
            return len(view)

    def _append(self, data: bytes | bytearray | memoryview, view: memoryview) -> None:
        length = len(view)
        if length < GATHERED:
            self._gathered += view
            if len(self._gathered) >= GATHERED:
                self._write()
            return
        if length <= self._config.block_size:
            data = bytes(view)
        source = Literal(data if isinstance(data, bytes) else view)
        self._write([Extent(0, length, source)], length)
        if not isinstance(data, bytes):
            self.release_sources()

    def flush(self) -> None:
        """Write nothing: bytes reach the file in whole blocks, the last ones at `close`.

        A torch that is not patched calls this at the end of each `torch.save` into a writer. If
        that fails, what it wrote is not a checkpoint, and all is discarded. Nothing is raised then:
        it would hide the first error.

        Raises:
            ValueError: the writer is closed.
        """
        error = _error_torch_handles()
        if error is not None:
            self.fail(error)
        else:
            self._check_open()

    def save_torch_storage_object_list(
        self,
        storage_obj_list: Sequence[tuple[torch.UntypedStorage, torch.dtype]],
        save_size: bool = True,
    ) -> int:
        """Append storages, as the legacy format wants them, and return how many bytes that is.

        Args:
            storage_obj_list: storages with the dtype of their elements.
            save_size: put the number of elements before each (int64, little-endian).

        Raises:
            WriteError: the disk is full or failed.
        """
        self._check_open()
        storages = [storage for storage, _ in storage_obj_list]
        element_sizes = [dtype.itemsize for _, dtype in storage_obj_list]
        batch = storage_batch(storages)
        counts = element_counts(batch.sizes, element_sizes, save_size)
        nbytes = sum(batch.sizes) + sum(map(len, counts))
        synchronize(storages)
        self.write_layout(storage_extents(batch, counts), nbytes)
        self.release_sources()
        return nbytes

    def write_plan(self, plan: ZipPlan) -> None:
        """Append a whole zip archive; its storages may change after `release_sources` or `close`.

        Raises:
            WriteError: the disk is full or failed.
        """
        self._container = "zip"
        ledger = CrcLedger(plan.sizes, plan.crcs) if None in plan.crcs else None
        self.write_layout(plan.extents, plan.nbytes, ledger)

    def write_whole(self, plan: ZipPlan) -> None:
        """Write an archive as the whole file, and close.

        While a network file system fails, the archive is written again to a new file, for at most
        `retry_seconds`.

        Raises:
            WriteError: the disk is full or failed.
        """
        while True:
            try:
                self.write_plan(plan)
                self.close()
            except ours(WriteError) as error:
                if not self._begins_again(error):
                    raise
                plan = plan._replace(extents=renewed(plan.extents))
            else:
                return

    @property
    def most_by_torch(self) -> int:
        """Up to how many bytes an archive is filled by torch's own writer; 0: none is."""
        is_new = isinstance(self._destination, Replacement)
        return self._config.small_file if is_new and self._config.direct is not True else 0

    def write_by_torch(
        self, archive: str, alignment: int, checksums: bool, records: Sequence[SmallRecord]
    ) -> bool:
        """Write a small archive as the whole file, and close; see `fill_by_torch`.

        Returns:
            False: nothing is written.

        Raises:
            WriteError: the disk failed.
        """
        self._check_open()
        if self.base is not None or self.tell():
            return False
        self._container = "zip"
        try:
            self._run("transfer", self._fill_by_torch, archive, alignment, checksums, records)
            if not self._written:
                return False
            self._run("sync", self._destination.sync)
            self._run("commit", self._commit)
        except ours(WriteError) as error:
            if not self._begins_again(error):
                raise
            return False
        self._end()
        return True

    def _fill_by_torch(self, *options: Any) -> None:
        fd = self._destination.fd
        if fill_by_torch(fd, *options):
            self._written = os.fstat(fd).st_size
            if self._bar is not None:
                self._bar.expect(self._written)
                self._bar.update(self._written)

    def _begins_again(self, error: WriteError) -> bool:
        """Begin a new file after an error of a network file system; False: it will not pass."""
        retries = self._destination.retries
        if retries is None or not retries.wait(error):
            return False
        self._begin(required(retries.open(), self.name))
        return True

    def write_layout(
        self, extents: Sequence[Extent], nbytes: int, ledger: CrcLedger | None = None
    ) -> None:
        """Append the extents of a layout; their memory may change after `release_sources`.

        Args:
            extents: in file order, without gaps, from byte 0 on.
            nbytes: of all of them.
            ledger: of the checksums that they need.

        Raises:
            WriteError: the disk is full or failed.
        """
        self._check_open()
        self._expected = self.tell() + nbytes
        if self._bar is not None:
            self._bar.expect(self._expected)
        cloned = 0
        if self.base is not None:
            at, fd = self._destination.start + self.tell(), self._destination.fd
            self._run("compare", self.base.clone, extents, at, fd, ledger, self._config)
            extents, cloned = self.base.take_rest(), self.base.cloned
            if self._bar is not None:
                self._bar.update(cloned)
        self._out.expect(self._expected - cloned)
        self._write(extents, nbytes, ledger, 0 if cloned else self._expected)

    def release_sources(self) -> None:
        """Return when no storage given so far is needed any more.

        Raises:
            WriteError: the disk is full or failed.
        """
        self._run("transfer", self._out.flush)

    def close(self) -> None:
        """Write the rest, sync, and commit. Idempotent.

        Does nothing after an error, such as that of a `torch.save` into the writer. An error that
        comes before anything is written discards, too: `finally: writer.close()`.

        Raises:
            WriteError: the disk is full or failed; the previous file is intact.
            ValueError: `abort` was called, so that nothing is saved.
        """
        if self._closed:
            if self._discarded and not self._failed:
                self._check_open()
            return
        handled = sys.exc_info()[1]
        if not self.tell() and handled is not None and handled is not self._handled:
            self.fail(handled)
            return
        self._expected = max(self._expected or 0, self.tell())
        try:
            if self._gathered:
                self._write()
            self._run("transfer", self._end_transfer)
            self._run("sync", self._destination.sync)
            self._run("commit", self._commit)
        except BaseException as error:  # of a signal handler between two phases, too
            self.fail(error)
            raise
        self._end()

    def _end(self) -> None:
        """Report what was committed."""
        self._closed = True
        self._handled = None
        self._leave_bar()
        self._publish()

    def abort(self) -> None:
        """Discard what was written; a path keeps its previous file. Idempotent.

        A `close` after it raises: whoever calls that expects a file.
        """
        if self._closed:
            return
        self._closed = self._discarded = True
        self._handled = None
        if os.getpid() != self._pid:
            return  # a forked child must not touch what its parent is writing
        stop = bool if self.base is None else self.base.stop
        finish(self._out.close, stop, self._leave_bar, self._destination.discard)

    def fail(self, error: BaseException) -> None:
        """Discard because of an error that the caller raises; a `close` then does nothing."""
        name_in(error, self.name)
        self._failed = True
        finish_after(error, self.abort)

    def __enter__(self) -> FastFileWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self.fail(error)

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

    def _write(
        self,
        extents: Sequence[Extent] = (),
        nbytes: int = 0,
        ledger: CrcLedger | None = None,
        reserved: int = 0,
    ) -> None:
        """Write what was gathered, and extents of `nbytes` bytes after it.

        Args:
            reserved: bytes of the whole file whose space is reserved first.
        """
        head, self._gathered = bytes(self._gathered), bytearray()
        if head:
            extents = [Extent(-len(head), len(head), Literal(head)), *extents]
        at = self._destination.start + self._written + len(head)
        self._run("transfer", self._transfer, extents, ledger, at, reserved)
        self._written += len(head) + nbytes

    def _transfer(
        self, extents: Sequence[Extent], ledger: CrcLedger | None, at: int, reserved: int
    ) -> None:
        wait_until_free()
        reserve(self._destination.fd, self._destination.start, reserved, self._config)
        self._out.write(extents, ledger, at)

    def _end_transfer(self) -> None:
        self._out.flush()
        self._out.close()

    def _check_open(self) -> None:
        if self._closed:
            what = f": what it held for {self.name} was discarded" if self._discarded else "."
            raise ValueError(f"I/O operation on closed file{what}")

    def _leave_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _commit(self) -> None:
        self._destination.commit()
        if isinstance(self._destination, CallersFile):
            self._destination.file.seek(self._destination.start + self._written)

    def _run(self, phase: str, step: Callable[..., object], *arguments: object) -> None:
        """Run a step of a phase of the save, and count its seconds; an error ends the save.

        Raises:
            WriteError: instead of the `OSError` of a system call.
        """
        began = perf_counter()
        try:
            step(*arguments)
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, OSError) or isinstance(error, WriteError) or is_foreign(error):
                raise
            raise save_error(error, self._destination, self._expected) from error
        finally:
            self._phases[phase] = self._phases.get(phase, 0.0) + perf_counter() - began

    def _why_unsynced(self) -> str:
        """Return why the file was not synced although the option asks for it, else nothing."""
        if self._destination.durable or not self._wants_sync:
            return ""
        if isinstance(self._destination, CallersFile):
            return "a file object is its owner's to sync"
        return "the file system cannot sync it"

    def _publish(self) -> None:
        outcome, config = self._outcome, self._config
        retries = self._destination.retries
        repeated = None if retries is None else retries.reason
        unshared = None if self.base is None else self.base.reason
        seconds = perf_counter() - self._began
        self._phases["serialize"] = max(0.0, seconds - sum(self._phases.values()))
        self._report = SaveReport(
            path=self.name,
            container=self._container,
            bytes=self._written,
            seconds=seconds,
            engine=outcome.engine,
            direct=outcome.direct,
            durable=self._destination.durable,
            durable_why=self._why_unsynced(),
            cloned=self.base.cloned if self.base is not None else 0,
            fallback=repeated or self._destination.fallback or unshared or outcome.fallback,
            phases=self._phases,
            transfer=outcome.transfer.word,
            transfer_why=outcome.transfer.why,
            snapshot=None if self.snapshot is None else self.snapshot(),
        )
        publish_save(self._report, config.on_report, direct=config.direct)


def _error_torch_handles() -> BaseException | None:
    """Return the error by which a block of torch.serialization is left; None: it is not.

    A traceback begins where its error is handled.
    """
    error = sys.exc_info()[1]
    trace = None if error is None else error.__traceback__
    named = None if trace is None else trace.tb_frame.f_globals.get("__name__")
    return error if named == "torch.serialization" else None
