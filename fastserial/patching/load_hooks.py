"""What torch's patched load functions call: the only connection of `torch.load` to fastserial.

`open_source` replaces `_open_file_like` and records the file for this thread. `_load`, which runs
inside it, then uses that record. In doubt torch reads the file itself, and legacy files always.
Names and arguments are part of every file in `patches/`.
"""

from __future__ import annotations

import logging
import os
import resource
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any, BinaryIO

import torch

from fastserial.config.performance import FEW_BYTES
from fastserial.errors import CheckpointFileError, CorruptCheckpointError
from fastserial.files.sources import FileSource
from fastserial.formats.source import DescriptorSource, Source
from fastserial.formats.zip_format import (
    MOST_INFLATED,
    Directory,
    RecordEntry,
    all_checksums,
    read_places,
    storage_records,
)
from fastserial.interrupts import ours, suppress
from fastserial.loading.prefetch import FastZipReader, Prefetch
from fastserial.loading.session import (
    NO_PLAIN_FILE,
    LoadSession,
    current_session,
    device_of,
    is_small,
)
from fastserial.loading.unpickler import unpickler_module
from fastserial.reasons import ASKED, QUICKER, Reason

__all__ = ["open_source", "unpickler_module", "zip_reader"]

_log = logging.getLogger("fastserial")


def open_source(target: Any) -> AbstractContextManager[BinaryIO]:
    """Return the replacement of `_open_file_like(target, "rb")`.

    Raises:
        OSError: the file cannot be opened; as stock.
    """
    serialization: Any = torch.serialization
    if serialization._is_path(target):
        return LoadSession(open(target, "rb"))
    return LoadSession(serialization._open_buffer_reader(target))


def zip_reader(stock: Any, map_location: Any, overall_storage: Any) -> Any:
    """Return the replacement of `_load`'s `zip_file`: a reader that reads ahead, or the same."""
    load = current_session()
    if load is None or isinstance(stock, FastZipReader):
        return stock
    load.used = True
    reader = stock
    try:
        load.fallback = _torchs_own(map_location, overall_storage)
        if load.fallback is None:
            reader = _fast_reader(load, stock, map_location)
        if load.config.verify_on_load and reader is stock:
            reader = _checking_reader(load, stock, overall_storage)
    except ours(CorruptCheckpointError) as error:
        error.path = error.path or load.name
        raise
    except ours(Exception) as error:  # a load that torch can do must not fail here
        load.fallback = str(error)
    if reader is not stock and load.prefetch is not None:
        load.prefetch.start()  # outside of `try`: what it raises is a signal handler's
    elif reader is stock:
        _log.debug("torch reads %r itself: %s", load.file, load.fallback)
    return reader


def _torchs_own(map_location: Any, overall_storage: Any) -> Reason | None:
    """Return why torch reads all storages, or None."""
    serialization: Any = torch.serialization
    guards: Any = torch._guards
    if overall_storage is not None:
        return Reason("mmap=True maps the file", ASKED)
    if guards.detect_fake_mode(None) is not None:
        return Reason("fake tensors need no bytes", ASKED)
    if getattr(serialization._serialization_tls, "skip_data", False):
        return Reason("skip_data asks for no bytes", ASKED)
    if isinstance(map_location, str | torch.device) and str(map_location).startswith("meta"):
        return Reason("meta tensors need no bytes", ASKED)
    return None


def _fast_reader(load: LoadSession, stock: Any, map_location: Any) -> Any:
    source, config = load.source, load.config
    if source is None:
        load.fallback = NO_PLAIN_FILE
        return stock
    if source.start:
        what = "the archive does not start at byte 0"
        load.fallback = Reason(what, "load from a file of its own")
        return stock
    began = perf_counter()
    count = len(stock.get_all_records())
    limit = source.size * MOST_INFLATED
    sized = hasattr(stock, "get_record_size")  # since 2.7
    few = min(FEW_BYTES, config.small_file)
    if source.size < count * few and sized and not config.verify_on_load:
        # torch reads them faster than we could find them
        with suppress(OSError):
            os.posix_fadvise(source.fd, 0, 0, os.POSIX_FADV_WILLNEED)
        load.fallback = Reason("many small records", QUICKER)
        load.pause.begin()  # many objects, few bytes, a short load
        return FastZipReader(stock, source.name, limit)
    directory = _known_records(load, DescriptorSource(source.fd, size=source.size), count)
    if directory is None:
        return FastZipReader(stock, source.name, limit) if sized else stock
    verify = config.verify_on_load
    records = storage_records(directory)
    device = None
    if records and config.transfer != "cpu":
        device = device_of(map_location, stock)
    if not records or is_small(source, config, device):
        load.fallback = Reason("a small file" if records else "no storages", QUICKER)
    else:
        _read_ahead(load, source, records, device)
    _note_checksums(load, directory)
    load.archive = FastZipReader(stock, source.name, limit, directory, load.prefetch, verify)
    load.phases["directory"] = perf_counter() - began
    return load.archive


def _known_records(load: LoadSession, source: Source, count: int) -> Directory | None:
    """Return an archive's directory; None: torch has to read the archive, as the load notes.

    Args:
        count: how many records torch sees.

    Raises:
        CorruptCheckpointError: it is damaged, and is to be verified.
    """
    try:
        directory = read_places(source)
    except ours(CheckpointFileError) as error:  # torch's reader may be less strict
        if load.config.verify_on_load and isinstance(error, CorruptCheckpointError):
            raise
        load.unverified = str(error)
    else:
        if directory.end.records == count:
            return directory
        load.unverified = "torch sees other records"
    load.fallback = load.fallback or load.unverified
    return None


def _note_checksums(load: LoadSession, directory: Directory) -> None:
    """Note whether a load compares the checksums of all that it reads."""
    if all_checksums(directory):
        load.verified = load.config.verify_on_load
    else:
        load.unverified = "records were saved without checksums"


def _checking_reader(load: LoadSession, stock: Any, overall_storage: Any) -> Any:
    """Return a reader that compares the checksums of what torch reads, or maps."""
    count = len(stock.get_all_records())
    source = load.bytes()
    directory = _known_records(load, source, count)
    if directory is None:
        return stock
    _note_checksums(load, directory)
    limit = source.size * MOST_INFLATED
    return FastZipReader(stock, load.name, limit, directory, verify=True, mapped=overall_storage)


def _read_ahead(
    load: LoadSession,
    source: FileSource,
    records: Sequence[RecordEntry],
    device: torch.device | None,
) -> None:
    """Plan to read the records; where that is impossible, torch's reader reads all of them."""
    if sys.is_finalizing():  # torch aborts if our memory is freed while the program ends
        load.fallback = "the interpreter is shutting down"
        return
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        # each thread of ours would take its stack and a heap of malloc's from what torch may use
        load.fallback = Reason("the address space is limited", "ulimit -v unlimited")
        return
    try:
        reader = load.open_reader(source)
        load.prefetch = Prefetch(reader, records, load.config.verify_on_load, device)
    except ours(Exception) as error:  # no such engine, no memory: what torch reads is verified, too
        load.fallback = str(error)
