"""What torch's patched load functions call: the one place where `torch.load` meets fastserial.

`open_source` stands in for `_open_file_like` and notes the file for this thread; `_load` and
`_legacy_load`, which run inside it, then ask for what was noted. Every doubt ends in torch's own
way. Names and arguments are part of every file in `patches/`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from time import perf_counter
from typing import Any, BinaryIO

import torch

from fastserial import config as config_module
from fastserial import filesystem, headroom
from fastserial.collection import paused_collection
from fastserial.containers.directory import RecordEntry
from fastserial.errors import CorruptCheckpointError
from fastserial.interrupts import finish
from fastserial.legacyloading import read_storages
from fastserial.loadreport import LoadReport, publish_load
from fastserial.prefetch import Prefetch
from fastserial.reader import FastFileReader
from fastserial.report import Latency
from fastserial.sources import FileSource, file_source
from fastserial.ziploading import (
    MOST_INFLATED,
    FastZipReader,
    all_checksums,
    read_places,
    storage_records,
)

__all__ = ["load_legacy_storages", "open_source", "zip_reader"]

_log = logging.getLogger("fastserial")
_FEW_BYTES = 32 * 1024  # per record, on average
_SHORT = 1 << 30  # bytes; cycles of other threads may wait as long as that takes


class _Open(threading.local):
    """The files that `torch.load` has open in this thread, the innermost last.

    It does not keep them: an interrupt may skip their `__exit__`.
    """

    def __init__(self) -> None:
        self.loads: list[weakref.ref[_Load]] = []


_open = _Open()


class _Load:
    """One `torch.load`: a context manager that opens and closes as torch's own would."""

    def __init__(self, opener: Any) -> None:
        self.opener = opener
        self.config = config_module.current()
        self.began = perf_counter()
        self.file: BinaryIO | None = None
        self.source: FileSource | None = None
        self.used = False  # `_load` or `_legacy_load` came by
        self.ours = False  # torch does not read the storages itself
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
        self.file = file
        self.source = file_source(file, self.config.small_file)
        _open.loads.append(weakref.ref(self))
        return file

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        _open.loads = [load for load in _open.loads if load() not in (None, self)]
        try:
            finish(self._release)
            if kind is None and self.used:
                self._check_and_publish()
        finally:
            self.opener.__exit__(kind, error, traceback)

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
            return  # unpickling a tensor comes here, too: it must not hide the load of a file
        self._publish()

    def _publish(self) -> None:
        reader, config = self.reader, self.config
        counts = reader.blocks.counts if reader is not None else None
        publish_load(
            LoadReport(
                path=self.source.name if self.source is not None else repr(self.file),
                container=self.container,
                bytes=counts.direct + counts.cached if counts is not None else 0,
                seconds=perf_counter() - self.began,
                engine=reader.blocks.engine_name if reader and self.ours else "torch",
                direct_bytes=counts.direct if counts is not None else 0,
                cached_bytes=counts.cached if counts is not None else 0,
                verified=self.verified,
                fallback=self.fallback or (reader.blocks.fallback if reader else None),
                block_size=config.block_size,
                queue_depth=config.queue_depth,
                threads=config.threads,
                phases=self.phases,
                submit=Latency.of(counts.submit_seconds if counts is not None else ()),
                complete=Latency.of(counts.complete_seconds if counts is not None else ()),
            ),
            config,
        )

    def open_reader(self, source: FileSource, needed: int = 0) -> FastFileReader:
        """Open the file; `needed`: bytes that the storages will take besides.

        Raises:
            MemoryError: a limit leaves no room for what we need beyond torch.
        """
        if not headroom.is_enough(self.config, needed, 2):
            raise MemoryError(headroom.REASON)
        self.reader = FastFileReader(source.fd, self.config, name=source.name)
        return self.reader


def open_source(target: Any) -> AbstractContextManager[BinaryIO]:
    """Return what stands in for `_open_file_like(target, "rb")`.

    Raises:
        OSError: the file cannot be opened; as stock.
    """
    serialization: Any = torch.serialization
    if serialization._is_path(target):
        # A save to the same path, in another thread, need not spare a file that only we read.
        return _Load(open(target, "rb", opener=filesystem.open_own))
    return _Load(serialization._open_buffer_reader(target))


def _current() -> _Load | None:
    loads = _open.loads
    load = loads[-1]() if loads else None
    return load if load is not None and not load.used else None


def zip_reader(stock: Any, map_location: Any, overall_storage: Any) -> Any:
    """Return what stands in for `_load`'s `zip_file`: a reader that reads ahead, or the same."""
    load = _current()
    if load is None or isinstance(stock, FastZipReader):
        return stock
    load.used = True
    try:
        load.fallback = _torchs_own(map_location, overall_storage)
        if load.fallback is None:
            return _fast_reader(load, stock)
    except CorruptCheckpointError as error:
        error.path = error.path or (load.source.name if load.source is not None else None)
        raise
    except Exception as error:  # a load that torch can do must not fail here
        load.fallback = str(error)
    _log.debug("torch reads %r itself: %s", load.file, load.fallback)
    return stock


def _torchs_own(map_location: Any, overall_storage: Any) -> str | None:
    """Return why no storage is to be read by us, or None."""
    serialization: Any = torch.serialization
    guards: Any = torch._guards
    if overall_storage is not None:
        return "mmap=True maps the file"
    if guards.detect_fake_mode(None) is not None:
        return "fake tensors need no bytes"
    if getattr(serialization._serialization_tls, "skip_data", False):
        return "skip_data asks for no bytes"
    if isinstance(map_location, str | torch.device) and str(map_location).startswith("meta"):
        return "meta tensors need no bytes"
    return None


def _fast_reader(load: _Load, stock: Any) -> Any:
    source, config = load.source, load.config
    if source is None:
        load.fallback = "not a plain file on a file system"
        return stock
    if source.start:
        load.fallback = "the archive does not start at byte 0"
        return stock
    began = perf_counter()
    if source.size <= _SHORT:
        # our objects beside torch's would bring a collection nearer, which may take as long
        load.pause.__enter__()
    count = len(stock.get_all_records())
    limit = source.size * MOST_INFLATED
    sized = hasattr(stock, "get_record_size")  # since 2.7
    if source.size < count * _FEW_BYTES and sized and not config.verify_on_load:
        # its records cost torch less than finding them costs us
        with contextlib.suppress(OSError):
            os.posix_fadvise(source.fd, 0, 0, os.POSIX_FADV_WILLNEED)
        load.fallback = "many small records"
        load.pause.begin()  # it is all objects, few bytes, and short
        return FastZipReader(stock, source.name, limit)
    directory = read_places(source.fd, source.size, stock)
    if count != directory.end.count:
        load.fallback = "torch sees other records"
        return FastZipReader(stock, source.name, limit) if sized else stock
    verify = config.verify_on_load
    load.verified = verify and all_checksums(directory)
    records = storage_records(directory)
    if source.size <= config.small_file or not records:
        load.fallback = "a small file" if records else "no storages"
    else:
        _read_ahead(load, source, records)
    prefetch = load.prefetch if load.ours else None
    load.archive = FastZipReader(stock, source.name, limit, directory, prefetch, verify)
    load.phases["directory"] = perf_counter() - began
    return load.archive


def _read_ahead(load: _Load, source: FileSource, records: Sequence[RecordEntry]) -> None:
    """Start reading the records; if that cannot be, torch's reader gives all of them."""
    try:
        reader = load.open_reader(source, source.size)
        load.prefetch = Prefetch(reader, records, load.config.verify_on_load)
        load.ours = load.prefetch.start(load)
        if not load.ours:
            load.fallback = "no thread to read ahead with"
    except Exception as error:  # no such engine, no thread: what is read is verified all the same
        load.fallback = str(error)


def load_legacy_storages(
    file: Any,
    storages: Mapping[Any, Any],
    keys: Sequence[Any],
    offset: int | None,
) -> Sequence[Any]:
    """Read all storages of a legacy checkpoint; return the keys that torch must still read.

    Args:
        file: what torch reads from.
        storages: the typed storages by key, allocated.
        keys: in the order of the file.
        offset: where the first one starts (bytes), None if torch reads through Python.
    """
    load = _current()
    if load is None or load.file is not file:
        return keys
    load.used = True
    load.container = "legacy"
    source = load.source
    if source is None or offset is None:
        load.fallback = "not a plain file on a file system"
    elif source.size - offset <= load.config.small_file:
        load.fallback = "a small file"
    else:
        try:
            end = read_storages(load.open_reader(source), storages, keys, offset)
        except Exception as error:  # torch does it again, and says what is wrong
            load.fallback = str(error)
        else:
            source.file.seek(end)
            load.ours = True
            return ()
    _log.debug("torch reads %r itself: %s", file, load.fallback)
    return keys
