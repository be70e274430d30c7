"""One `torch.load`: what the hooks know of it from its first to its last step."""

from __future__ import annotations

import contextlib
import contextvars
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from functools import partial
from io import BytesIO
from time import perf_counter
from typing import Any, BinaryIO, cast

import torch

from fastserial.config import Config, current
from fastserial.config.performance import (
    MOSTLY_CACHED,
    SHORT_LOAD,
    SMALL_CACHED_LOAD,
    SMALL_DEVICE_LOAD,
    SMALL_LOAD,
)
from fastserial.errors import ConfigError, CorruptCheckpointError
from fastserial.files.linux import cached_fraction
from fastserial.files.sources import FileSource, file_source
from fastserial.formats.source import DescriptorSource, ObjectSource, Source
from fastserial.formats.zip_format import LOCAL_SIGNATURE
from fastserial.interrupts import finish_after, ours
from fastserial.loading.prefetch import FastZipReader, Prefetch
from fastserial.loading.pump import ReadCounts
from fastserial.loading.reader import FastFileReader, report_load
from fastserial.memory.devices import has_streams
from fastserial.memory.held_settings import paused_collection
from fastserial.reasons import Reason
from fastserial.reports import HOST_ONLY, warn_unmet


class _Open(threading.local):
    """The files that `torch.load` has open in this thread, the innermost last.

    It does not keep them: an interrupt may skip their `__exit__`.
    """

    def __init__(self) -> None:
        self.loads: list[weakref.ref[LoadSession]] = []


_open = _Open()


class VerifyRequest:
    """A call that has to compare checksums.

    Attributes:
        is_met: its load compared them.
    """

    is_met = False


_request: contextvars.ContextVar[VerifyRequest | None] = contextvars.ContextVar(
    "fastserial_verify_request", default=None
)


@contextlib.contextmanager
def verify_request() -> Iterator[VerifyRequest]:
    """Make the next load of this thread an error if it cannot compare checksums."""
    request = VerifyRequest()
    token = _request.set(request)
    try:
        yield request
    finally:
        _request.reset(token)


_LEGACY = Reason("the legacy container", "save it again in torch's zip format")
NO_PLAIN_FILE = Reason(
    "not a plain file on a file system", "load from a path, or a plain file object"
)


class LoadSession:
    """One `torch.load`: a context manager that opens and closes the file as torch's own does."""

    def __init__(self, opener: Any) -> None:
        self.opener = opener
        self.config = current()
        self.began = perf_counter()
        self.file: BinaryIO | None = None
        self.source: FileSource | None = None
        self.head: bytes | None = None  # of another file than a plain one, at its `start`
        self.start = 0
        self.request: VerifyRequest | None = None
        self.is_nested = False
        self.unverified: str | None = None  # why it is not `verified`
        self.used = False  # `_load` has asked for it
        self.container = "zip"
        self.fallback: str | None = None
        self.verified = False
        self.phases: dict[str, float] = {}
        self.reader: FastFileReader | None = None
        self.prefetch: Prefetch | None = None
        self.archive: FastZipReader | None = None
        self.pause = paused_collection()

    def __enter__(self) -> BinaryIO:
        file: BinaryIO = self.opener.__enter__()
        try:
            self._begin(file)
        except BaseException as error:  # then `with` calls no `__exit__`
            leave = partial(self.opener.__exit__, type(error), error, error.__traceback__)
            finish_after(error, self._release, leave)
            raise
        return file

    def _begin(self, file: BinaryIO) -> None:
        self.file = file
        self.source = file_source(file, self.config.small_file)
        if self.source is not None and self.source.size <= SHORT_LOAD:
            # our objects would bring the next garbage collection nearer, which may take as long
            self.pause.begin()
        if self.source is None:  # what torch does next, with the same errors
            self.start = file.tell()
            self.head = file.read(len(LOCAL_SIGNATURE))
            file.seek(self.start)
        self.is_nested = any(load() is not None for load in _open.loads)
        self.request = None if self.is_nested else _request.get()
        _open.loads.append(weakref.ref(self))

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        _open.loads = [load for load in _open.loads if load() not in (None, self)]
        try:
            finish_after(error, self._release)
            if kind is None and (self.used or self._is_legacy()):
                if self.config.verify_on_load:
                    self._judge()
                self._check_and_publish()
        finally:
            self.opener.__exit__(kind, error, traceback)

    def _is_legacy(self) -> bool:
        """Return whether torch loaded a legacy file, of which `_load` knows nothing.

        A zip that it did not load holds TorchScript, or torch only looked at it.
        """
        source, head = self.source, self.head
        self.container, self.fallback = "legacy", NO_PLAIN_FILE
        if source is not None:
            self.fallback = _LEGACY
            try:
                head = os.pread(source.fd, len(LOCAL_SIGNATURE), source.start)
            except ours(OSError):  # the program has closed it
                return False
        return head != LOCAL_SIGNATURE

    def _judge(self) -> None:
        """Say whether the checksums were compared, as the program wishes.

        Raises:
            ConfigError: they were not, and this call asked for it.
        """
        if self.verified:
            if self.request is not None:
                self.request.is_met = True
            return
        if self.is_nested and isinstance(self.file, BytesIO):
            return  # unpickled from a record, which has a checksum
        why = self.unverified or self.fallback or "fastserial did not read it"
        if self.container == "legacy":
            why = "legacy files have no checksums"
        if self.request is not None:
            raise unverified_error(self.name, why)
        warn_unmet("verify_on_load", why)
        text = f"not verified: {why}"
        self.fallback = text if self.fallback in (None, why) else f"{self.fallback}; {text}"

    def _release(self) -> None:
        self.pause.end()
        if self.prefetch is not None:
            self.prefetch.close()
            self.phases["wait"] = self.prefetch.wait_seconds
            if self.prefetch.error is not None:
                self.fallback = f"reading ahead ended, torch read the rest: {self.prefetch.error}"
        if self.reader is not None:
            self.reader.close()

    def _check_and_publish(self) -> None:
        source, archive = self.source, self.archive
        if source is not None:
            if self.reader is not None and not source.is_unchanged():
                what = "the file changed while it was read"
                raise CorruptCheckpointError(what, path=source.name)
            if archive is not None and archive.position is not None:
                source.file.seek(source.start + archive.position)
        if isinstance(self.file, BytesIO) and not self.config.verify_on_load:
            return  # unpickling a tensor calls this, too: it must not hide the load of a file
        self._publish()

    def _publish(self) -> None:
        blocks = self.reader.blocks if self.reader is not None else None
        counts = blocks.counts if blocks is not None else ReadCounts()
        read = counts.direct + counts.cached
        fallback = self.fallback or (blocks.fallback if blocks is not None else None)
        report_load(
            counts,
            self.config,
            path=self.name,
            container=self.container,
            seconds=perf_counter() - self.began,
            engine=blocks.engine_name if blocks is not None and read else "torch",
            verified=self.verified,
            fallback=fallback,
            phases=self.phases,
            transfer=self.reader.transfer if self.reader is not None else HOST_ONLY,
        )

    @property
    def name(self) -> str:
        """The file's path, or what the file object calls itself."""
        return self.source.name if self.source is not None else repr(self.file)

    def bytes(self) -> Source:
        """Return the bytes that torch reads, to read them at any place."""
        if self.source is not None:
            return DescriptorSource(self.source.fd, self.source.start)
        return ObjectSource(cast("BinaryIO", self.file), self.start)

    def open_reader(self, source: FileSource) -> FastFileReader:
        """Open the file for reads ahead of torch's."""
        self.reader = FastFileReader(source.fd, self.config, name=source.name)
        return self.reader


def unverified_error(name: object, why: str) -> ConfigError:
    """Return the error of a call that asks for checksums that were not compared."""
    return ConfigError(f"{name}: its checksums were not compared: {why}. Load it with verify=False")


def current_session() -> LoadSession | None:
    """Return the load of this thread that has not taken its session yet, None without one."""
    loads = _open.loads
    load = loads[-1]() if loads else None
    return load if load is not None and not load.used else None


def is_small(source: FileSource, config: Config, device: torch.device | None) -> bool:
    """Return whether torch reads the storages of this file at least as fast as we would.

    Args:
        device: to which it reads them; None: to the host.
    """
    most = SMALL_LOAD
    if device is not None and config.transfer == "auto":
        from fastserial.memory.buffers import pinned_store  # not without a device

        most = SMALL_LOAD if pinned_store.has_kept else SMALL_DEVICE_LOAD
    if source.size <= most * config.small_file:
        return True
    if source.size > SMALL_CACHED_LOAD * config.small_file:
        return False
    return (cached_fraction(source.fd, 0, source.size) or 0.0) >= MOSTLY_CACHED


# -- devices -------------------------------------------------------------------------------------

_HOST = "cpu"


def device_of(map_location: Any, stock: Any) -> torch.device | None:
    """Return the device to read all storages to, where torch would move them.

    None: they are read to the host, and torch decides where each goes.

    Args:
        map_location: of `torch.load`.
        stock: torch's reader of the file.
    """
    if not isinstance(map_location, str | torch.device) or str(map_location) == _HOST:
        return None  # torch is not asked for its devices: that would initialize CUDA
    try:
        device = torch.device(map_location)
    except ours(RuntimeError):  # torch will say so
        return None
    module: Any = getattr(torch, device.type, None)
    if not has_streams(device) or not module.is_available():
        return None
    index = module.current_device() if device.index is None else device.index
    name = "byteorder"  # torch swaps bytes on the host
    in_our_order = stock.has_record(name) and stock.get_record(name) == sys.byteorder.encode()
    if index >= module.device_count() or not in_our_order or not _only_torchs_own():
        return None
    return torch.device(device.type, index)


def _only_torchs_own() -> bool:
    """Return whether only torch's own functions move storages to devices."""
    serialization: Any = torch.serialization
    return all(
        getattr(restore, "func", restore).__module__ == serialization.__name__
        for _, _, restore in serialization._package_registry
    )
