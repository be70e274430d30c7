"""Telling what a checkpoint holds without loading it, executing its pickle or needing torch."""

from __future__ import annotations

import os

from fastserial.checkpoints.dcp_folder import is_dcp_folder
from fastserial.checkpoints.folder_inspection import inspect_folder
from fastserial.checkpoints.inspection import Inspection, StorageUse
from fastserial.errors import CheckpointFileError
from fastserial.formats.container import ZipContainer, open_container
from fastserial.formats.pickles import Limits
from fastserial.formats.tensors import Outline
from fastserial.formats.zip.records import PICKLE
from fastserial.interrupts import Descriptors
from fastserial.memory.held_settings import paused_collection

__all__ = ["Inspection", "StorageUse", "inspect"]


def inspect(path: str | os.PathLike[str], limits: Limits | None = None) -> Inspection:
    """Read a checkpoint's structure and pickle; the bytes of its tensors are not read.

    Args:
        path: the file, or a folder of torch.distributed.checkpoint.
        limits: what reading the pickle may take (bytes, seconds).

    Raises:
        CorruptCheckpointError: it is damaged.
        UnreadableCheckpointError: it is no checkpoint, or none that can be inspected.
        PickleLimitError: its pickle is larger than the limits.
        OSError: it cannot be read.
    """
    name = os.fspath(path)
    try:
        with Descriptors() as files, paused_collection():
            return _inspect(name, files.open(name, os.O_RDONLY | os.O_NONBLOCK), limits)
    except CheckpointFileError as error:
        error.path = error.path or name
        raise


def _inspect(name: str, fd: int, limits: Limits | None) -> Inspection:
    if is_dcp_folder(name):
        return inspect_folder(name)
    container = open_container(fd, name, limits, all_records=True)
    found = container.outline
    archive, notes = None, found.notes
    if isinstance(container, ZipContainer):
        archive = container.directory.archive_name
        if container.directory.find(PICKLE) is None:
            notes = ["there is no data.pkl: no checkpoint of torch.save", *notes]
    if not found.complete:
        notes.append("there is more in the pickle than the limits allow to look at")
    records = sorted(container.records, key=lambda record: record.header_offset)
    return Inspection(
        path=name,
        format=container.format,
        bytes=container.source.size,
        archive_name=archive,
        records=tuple((r.name, r.data_offset, r.size) for r in records),
        tensors=tuple(found.tensors),
        storages=_storages(found),
        imports=tuple(sorted(map(str, found.globals))),
        values=found.values,
        notes=tuple(notes),
    )


def _storages(found: Outline) -> tuple[StorageUse, ...]:
    needed: dict[str, int] = {}
    counts: dict[str, int] = {}
    for tensor in found.tensors:
        if tensor.storage is not None:
            needed[tensor.storage] = needed.get(tensor.storage, 0) + tensor.nbytes
            counts[tensor.storage] = counts.get(tensor.storage, 0) + 1
    uses = [
        StorageUse(
            key=key,
            dtype=entry.dtype,
            nbytes=entry.nbytes,
            offset=entry.offset,
            location=entry.location,
            tensors=tuple(users := found.users.get(key, ())),
            # one more user than tensors: the storage itself was saved, too
            needed_bytes=min(needed.get(key, 0), entry.nbytes)
            if len(users) <= counts.get(key, 0)
            else entry.nbytes,
        )
        for key, entry in found.storages.items()
    ]
    return tuple(sorted(uses, key=lambda use: (use.offset is None, use.offset or 0)))
