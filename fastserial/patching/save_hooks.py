"""What torch's patched save functions call: the only connection of `torch.save` to fastserial.

Each function returns a value that leaves the save to torch where fastserial cannot do it. Names and
arguments are part of every file in `patches/`.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

# the default engine: a signal handler must not find it half imported
import fastserial.engines.threads  # noqa: F401
from fastserial.config import current
from fastserial.errors import WriteError
from fastserial.files.destination import StockWay, open_destination
from fastserial.formats.zip_format import DESCRIPTOR_SIGNATURE
from fastserial.formats.zip_layout import MAX_ALIGNMENT, archive_name
from fastserial.interrupts import ours
from fastserial.memory.storages import device_types
from fastserial.patching import load_hooks
from fastserial.patching.self_check import self_check
from fastserial.reasons import ASKED, Reason
from fastserial.reports import SAVES, warn_unmet
from fastserial.saving.archive import ZipArchive, storage_alignment
from fastserial.saving.writer import FastFileWriter, needs_name

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = [
    "open_file",
    "open_writer",
    "open_zip_writer",
    "save_legacy_storages",
    "save_zip_storages",
    "self_check",
    "zip_writer",
]

_log = logging.getLogger("fastserial")
# Storages on these devices are torch's: they hold no bytes, or raise when saved.
_BODILESS = frozenset({"meta"})


def open_zip_writer(target: Any) -> AbstractContextManager[Any] | None:
    """Return the replacement of `_open_zipfile_writer(target)`, or None for torch's own.

    Args:
        target: a path or a file object.

    Raises:
        WriteError: the target cannot be written.
    """
    found = zip_writer(target)
    if isinstance(found, StockWay):
        _count(found, target)
        return None
    writer, archive, alignment = found
    return ZipArchive(writer, archive, writer is not target, alignment)


def open_file(target: Any, mode: str) -> AbstractContextManager[Any] | None:
    """Return the replacement of `_open_file_like(target, mode)`, or None for torch's own.

    Raises:
        WriteError: the target cannot be written.
    """
    if mode == "rb":
        return load_hooks.open_source(target)
    if mode != "wb":
        return None
    if isinstance(target, FastFileWriter):
        return _CallersWriter(target)
    if _takes_storages(target):  # DeepSpeed's writer
        return None
    found = open_writer(target, "legacy")
    if isinstance(found, StockWay):
        _count(found, target)
        return None
    return found


class _CallersWriter:
    """The block of a legacy save into a writer that its caller closes: an error discards."""

    def __init__(self, writer: FastFileWriter) -> None:
        self._writer = writer

    def __enter__(self) -> FastFileWriter:
        return self._writer

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._writer.fail(error)


def zip_writer(
    target: Any, prefix: str | None = None
) -> tuple[FastFileWriter, str, int] | StockWay:
    """Return the writer of a zip container, or why torch has to write it.

    Args:
        target: a path, a file object, or a writer.
        prefix: what is put before the records' names; by default the file's name, as torch does.
            With one, a symbolic link at the path is replaced, as by programs that pickle into
            memory and rename a file over the path (Lightning), not the file that it leads to.

    Returns:
        The writer, what is put before the records' names, and the alignment of their data (bytes).

    Raises:
        WriteError: the target cannot be written.
    """
    alignment = storage_alignment()
    if not 0 < alignment <= MAX_ALIGNMENT:
        what = "the storage_alignment does not fit the format"
        return StockWay(Reason(what, "set a smaller storage_alignment"))
    archive = "archive"
    if torch.serialization._serialization_tls.skip_data:
        return StockWay(Reason("skip_data leaves the storages out", ASKED))
    if isinstance(target, FastFileWriter):
        return target, archive, alignment
    if isinstance(target, str | os.PathLike):
        archive = archive_name(os.fsdecode(target)) if prefix is None else prefix
        if not archive or archive.encode().startswith(DESCRIPTOR_SIGNATURE):
            what = "not a file name that torch can put into an archive"
            return StockWay(Reason(what, "give torch.save the name of a file"))
    writer = open_writer(target, "zip", prefix is not None)
    return writer if isinstance(writer, StockWay) else (writer, archive, alignment)


def save_zip_storages(
    archive: Any, storages: Mapping[str, torch.UntypedStorage], keys: Sequence[str]
) -> bool:
    """Take all storages of a zip checkpoint; False leaves them to torch's loop."""
    add_storages = getattr(archive, "add_storages", None)
    if add_storages is None:
        return False
    found = [storages[key] for key in keys]
    if not _all_have_bytes(found):
        return False
    add_storages(found, [f"data/{key}" for key in keys])
    return True


def save_legacy_storages(
    file: Any,
    storages: Mapping[str, tuple[torch.UntypedStorage, torch.dtype]],
    keys: Sequence[str],
) -> bool:
    """Take all storages of a legacy checkpoint; False leaves them to torch's loop."""
    if not _takes_storages(file):
        return False
    found = [storages[key] for key in keys]
    if not _all_have_bytes([storage for storage, _ in found]):
        return False
    began = perf_counter()
    file.save_torch_storage_object_list(found, save_size=True)
    if not isinstance(file, FastFileWriter):  # which counts when it is closed
        SAVES.add(sum(storage.nbytes() for storage, _ in found), perf_counter() - began, None)
    return True


def _takes_storages(file: Any) -> bool:
    return callable(getattr(type(file), "save_torch_storage_object_list", None))


def open_writer(
    target: Any, container: str, replace_link: bool = False
) -> FastFileWriter | StockWay:
    """Return a writer to a path or a file object, or why torch has to write it.

    Args:
        container: what the file will hold, for the report.
        replace_link: a symbolic link at the path is replaced, not the file that it leads to.

    Raises:
        WriteError: the target cannot be written.
    """
    config = current()
    try:
        found = open_destination(
            target,
            config.durable,
            replace_link,
            named=needs_name(config),
            retry_seconds=config.retry_seconds,
        )
    except ours(WriteError) as error:
        scarce = error.errno in (errno.EMFILE, errno.ENFILE)
        if not scarce or (replace_link and os.path.islink(target)):  # torch would follow it
            raise
        raise_it = "raise the limit (`ulimit -n`)"  # torch needs only one
        return StockWay(Reason("too few file descriptors are left", raise_it))
    if isinstance(found, StockWay):
        return found
    return FastFileWriter(found, config, container=container)


def _count(found: StockWay, target: Any) -> None:
    """Count a save that torch does itself, with the reason."""
    _log.debug("torch writes %r itself: %s", target, found.reason)
    SAVES.add_torchs(found.reason)
    if current().direct is True:
        warn_unmet("direct=True", f"torch writes the file: {found.reason}")


def _all_have_bytes(storages: Sequence[torch.UntypedStorage]) -> bool:
    return _BODILESS.isdisjoint(device_types(storages))
