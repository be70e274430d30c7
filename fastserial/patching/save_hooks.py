"""What the patched torch functions call: the one place where torch meets fastserial.

Each function returns a value that means "torch's own way" when the case is not ours. Names and
arguments are part of every file in `patches/`.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

# the usual engine: a signal handler must not find half of it
import fastserial.engines.threads  # noqa: F401
from fastserial.errors import WriteError
from fastserial.files.targets import (
    FileTarget,
    InPlaceTarget,
    PathTarget,
    StockWay,
    Target,
    target_of,
)
from fastserial.formats.zip.layout import MAX_ALIGNMENT, archive_name
from fastserial.formats.zip.structs import DESCRIPTOR_SIGNATURE
from fastserial.memory.storages import device_types
from fastserial.patching import load_hooks
from fastserial.patching.self_check import self_check
from fastserial.reports import SAVES
from fastserial.saving import torch_writer
from fastserial.saving.archive import ZipArchive
from fastserial.saving.writer import FastFileWriter

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = [
    "open_file",
    "open_zip_writer",
    "save_legacy_storages",
    "save_zip_storages",
    "self_check",
]

_log = logging.getLogger("fastserial")
# Storages on these devices are torch's: they hold no bytes, or raise when saved.
_BODILESS = frozenset({"meta"})


def open_zip_writer(target: Any, prefix: str | None = None) -> AbstractContextManager[Any] | None:
    """Return what stands in for `_open_zipfile_writer(target)`, or None for torch's own.

    Args:
        target: a path or a file object.
        prefix: what is put before the records' names; by default the file's name, as torch does.
            With one, a symbolic link at the path is replaced, as by programs that pickle into
            memory and rename a file over the path (Lightning), not the file that it leads to.

    Raises:
        WriteError: the target cannot be written.
    """
    alignment = torch_writer.alignment()
    if not 0 < alignment <= MAX_ALIGNMENT:
        return None
    if isinstance(target, FastFileWriter):
        return ZipArchive(target, "archive", owns_writer=False)
    found = _classify(target, replace_link=prefix is not None)
    if isinstance(found, PathTarget | InPlaceTarget):
        archive = archive_name(found.name) if prefix is None else prefix
        if not archive or archive.encode().startswith(DESCRIPTOR_SIGNATURE):
            return None
    elif isinstance(found, FileTarget) and not torch.serialization._serialization_tls.skip_data:
        archive = "archive"
    else:
        return None
    writer = _writer(found, "zip")
    return ZipArchive(writer, archive, True, alignment) if writer is not None else None


def open_file(target: Any, mode: str) -> AbstractContextManager[Any] | None:
    """Return what stands in for `_open_file_like(target, mode)`, or None for torch's own.

    Raises:
        WriteError: the target cannot be written.
    """
    if mode == "rb":
        return load_hooks.open_source(target)
    if mode != "wb" or _takes_storages(target):
        return None
    found = _classify(target)
    if found is None:
        return None
    return _writer(found, "legacy")


def save_zip_storages(
    archive: Any, storages: Mapping[str, torch.UntypedStorage], keys: Sequence[str]
) -> bool:
    """Hand all storages of a zip checkpoint over; False leaves them to torch's loop."""
    add_storages = getattr(archive, "add_storages", None)
    if add_storages is None or torch.serialization._serialization_tls.skip_data:
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
    """Hand all storages of a legacy checkpoint over; False leaves them to torch's loop."""
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
    return callable(getattr(file, "save_torch_storage_object_list", None))


def _writer(found: Target, container: str) -> FastFileWriter | None:
    """Return a writer, or None where there are not enough descriptors: torch needs only one.

    Raises:
        WriteError: the target cannot be written.
    """
    try:
        return FastFileWriter(found, container=container)
    except WriteError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        _log.debug("torch writes %r itself: %s", found.name, error)
        SAVES.add_torchs("too few file descriptors are left")
        return None


def _all_have_bytes(storages: Sequence[torch.UntypedStorage]) -> bool:
    return _BODILESS.isdisjoint(device_types(storages))


def _classify(target: Any, replace_link: bool = False) -> Target | None:
    found = target_of(target, replace_link)
    if isinstance(found, StockWay):
        _log.debug("torch writes %r itself: %s", target, found.reason)
        SAVES.add_torchs(found.reason)
        return None
    return found
