"""Telling what a checkpoint holds without loading it, executing its pickle or needing torch."""

from __future__ import annotations

import os
from collections.abc import Iterable

from fastserial.checkpoints.dcp_folder import is_dcp_folder
from fastserial.checkpoints.folder_inspection import inspect_folder
from fastserial.checkpoints.inspection import Inspection, StorageUse
from fastserial.checkpoints.rank_folder import find_rank_folder
from fastserial.checkpoints.rank_folder_inspection import inspect_rank_folder
from fastserial.errors import CheckpointFileError
from fastserial.formats.detect import Format, checkpoint_format
from fastserial.formats.legacy.structure import read_legacy
from fastserial.formats.pickles import Limits
from fastserial.formats.safetensors import read_header
from fastserial.formats.source import DescriptorSource, Source
from fastserial.formats.storages import ITEM_BYTES, contiguous_stride
from fastserial.formats.tensors import Outline, TensorEntry, outline, zip_outline
from fastserial.formats.zip.directory import Directory, read_directory
from fastserial.formats.zip.records import read_record
from fastserial.interrupts import Descriptors
from fastserial.memory.held_settings import paused_collection

__all__ = ["Inspection", "StorageUse", "inspect"]

_SMALL_RECORD = 4096
_MOST_NOTES = 100
_HINTS = (".format_version", ".storage_alignment", "byteorder", "version")


def inspect(path: str | os.PathLike[str], limits: Limits | None = None) -> Inspection:
    """Read a checkpoint's structure and pickle; the bytes of its tensors are not read.

    Args:
        path: the file, or a folder of torch.distributed.checkpoint or torch_checkpointing.
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
    folder = find_rank_folder(name)
    if folder is not None:
        return inspect_rank_folder(name, folder, lambda path: inspect(path, limits))
    found, source = checkpoint_format(fd, name), DescriptorSource(fd)
    if found is Format.ZIP:
        return _inspect_zip(name, source, limits)
    if found is Format.LEGACY:
        return _inspect_legacy(name, source, limits)
    return _inspect_safetensors(name, source)


def _inspect_zip(name: str, source: Source, limits: Limits | None) -> Inspection:
    directory = read_directory(source)
    found = zip_outline(source, directory, limits)
    notes = () if found is not None else ("there is no data.pkl: no checkpoint of torch.save",)
    found = found or Outline()
    places = {
        record.name.removeprefix("data/"): record.data_offset
        for record in directory.records
        if record.name.startswith("data/")
    }
    return Inspection(
        path=name,
        format="zip",
        bytes=source.size,
        hints=_zip_hints(source, directory),
        archive_name=directory.archive_name,
        records=tuple((r.name, r.data_offset, r.size) for r in directory.in_file_order()),
        tensors=tuple(found.tensors),
        storages=_storages(found, places),
        imports=tuple(sorted(map(str, found.globals))),
        values=found.values,
        notes=(*notes, *_notes(found)),
    )


def _inspect_legacy(name: str, source: Source, limits: Limits | None) -> Inspection:
    file = read_legacy(source, limits)
    found = outline(file.decoded, limits)
    order = "little" if file.little_endian else "big"
    return Inspection(
        path=name,
        format="legacy",
        bytes=source.size,
        hints=(
            "torch before 1.6, or _use_new_zipfile_serialization=False",
            f"{order}-endian",
        ),
        archive_name=None,
        records=(),
        tensors=tuple(found.tensors),
        storages=_storages(found, {s.key: s.data_offset for s in file.storages}),
        imports=tuple(sorted(map(str, found.globals))),
        values=found.values,
        notes=_notes(found),
    )


def _inspect_safetensors(name: str, source: Source) -> Inspection:
    header = read_header(source)
    tensors: list[TensorEntry] = []
    storages: list[StorageUse] = []
    notes: list[str] = []
    for entry in header:
        dtype = entry.dtype
        if dtype is None:
            notes.append(f"tensor {entry.key}: torch has no dtype {entry.type_name}")
            continue
        strides = contiguous_stride(entry.shape)
        tensors.append(
            TensorEntry(entry.key, dtype, entry.shape, strides, entry.key, 0, entry.nbytes)
        )
        storages.append(
            StorageUse(
                entry.key, dtype, entry.nbytes, entry.offset, "cpu", (entry.key,), entry.nbytes
            )
        )
    return Inspection(
        path=name,
        format="safetensors",
        bytes=source.size,
        hints=(),
        archive_name=None,
        records=(),
        tensors=tuple(tensors),
        storages=tuple(storages),
        imports=(),
        values=0,
        notes=tuple(notes[:_MOST_NOTES]),
    )


def _notes(found: Outline) -> tuple[str, ...]:
    notes = found.notes
    if not found.complete:
        notes.append("there is more in the pickle than the limits allow to look at")
    return tuple(notes)


def _zip_hints(source: Source, directory: Directory) -> tuple[str, ...]:
    names = {record.name for record in directory.records}
    if any(name.startswith("code/") for name in names) or "constants.pkl" in names:
        hints = ["a TorchScript or package archive"]
    elif ".format_version" in names:
        hints = ["torch 2.7 or later"]
    elif ".data/serialization_id" in names:
        hints = ["torch 2.1 to 2.6"]
    else:
        hints = ["torch 1.6 to 2.0, or another writer"]
    for name in _HINTS:
        record = directory.find(name)
        if record is not None and record.size <= _SMALL_RECORD:
            text = read_record(source, record, _SMALL_RECORD).decode("utf-8", "backslashreplace")
            hints.append(f"{name.lstrip('.')} {text.strip()}")
    return tuple(hints)


def _storages(found: Outline, places: dict[str, int]) -> tuple[StorageUse, ...]:
    within: dict[str, list[TensorEntry]] = {}
    for tensor in found.tensors:
        if tensor.storage is not None:
            within.setdefault(tensor.storage, []).append(tensor)
    uses = [
        StorageUse(
            key=key,
            dtype=entry.dtype,
            nbytes=entry.nbytes,
            offset=places.get(key),
            location=entry.location,
            tensors=tuple(found.users.get(key, ())),
            needed_bytes=_needed(within.get(key, ()), entry.nbytes, found.users.get(key, ())),
        )
        for key, entry in found.storages.items()
    ]
    return tuple(sorted(uses, key=lambda use: (use.offset is None, use.offset or 0)))


def _needed(tensors: Iterable[TensorEntry], nbytes: int, users: Iterable[str]) -> int:
    """Return how many bytes of a storage its tensors need.

    That is no more than the bytes they span, and no more than their elements, each tensor that is
    there twice counted once.
    """
    distinct = {(t.dtype, t.storage_offset, t.shape, t.stride): t for t in tensors}
    if len(list(users)) > len(list(tensors)):
        return nbytes  # the storage itself was saved, too
    elements = spanned = reach = 0
    for tensor in sorted(distinct.values(), key=lambda t: t.span):
        elements += _distinct_bytes(tensor)
        first, last = tensor.span
        spanned += max(0, last - max(first, reach))
        reach = max(reach, last)
    return min(elements, spanned, nbytes)


def _distinct_bytes(tensor: TensorEntry) -> int:
    """Return the bytes of a tensor's elements, without those that `expand` repeats."""
    count = tensor.nbytes
    for n, step in zip(tensor.shape, tensor.stride, strict=True):
        if step == 0 and n > 1:
            count //= n
    return max(count, ITEM_BYTES[tensor.dtype] if tensor.nbytes else 0)
