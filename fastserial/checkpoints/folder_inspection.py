"""Telling what a folder of torch.distributed.checkpoint holds, from its `.metadata` alone."""

from __future__ import annotations

import os
from math import prod

from fastserial.checkpoints.dcp_folder import list_folder, one_metadata
from fastserial.checkpoints.inspection import Inspection
from fastserial.formats.dcp import Metadata, Stored
from fastserial.formats.storages import ITEM_BYTES, contiguous_stride
from fastserial.formats.tensors import TensorEntry

__all__ = ["inspect_folder"]

_MOST_NOTES = 100


def inspect_folder(path: str) -> Inspection:
    """Return what a folder holds; nothing is unpickled, and only its `.metadata` is read.

    Raises:
        CorruptCheckpointError: it is damaged, or the save was not completed.
        PickleLimitError: the metadata takes too long to read.
        OSError: it cannot be read.
    """
    listed = list_folder(path)
    metadata = one_metadata(path)
    needed = dict.fromkeys(item.file for item in metadata.items)
    sizes = {name: _size(path, name) for name in (*listed.metadata, *listed.shards)}
    notes = [f"{name}: it has no place" for name in metadata.missing]
    notes += [f"{name}: the file is missing" for name in needed if sizes.get(name) is None]
    spare = [name for name in listed.shards if name not in needed]
    notes += [f"{name}: it belongs to no checkpoint" for name in spare]
    notes += [
        f"tensor {key}: torch has no dtype {stored.dtype} that is known here"
        for key, stored in metadata.tensors.items()
        if stored.dtype not in ITEM_BYTES
    ]
    return Inspection(
        path=path,
        format="dcp packed" if metadata.packed else "dcp",
        bytes=sum(size or 0 for size in sizes.values()),
        hints=tuple(_hints(metadata, len(needed))),
        archive_name=None,
        records=tuple(
            (f"{item.file}: {item.name}", item.offset, item.length) for item in metadata.items
        ),
        tensors=tuple(
            _entry(key, stored)
            for key, stored in metadata.tensors.items()
            if stored.dtype in ITEM_BYTES
        ),
        storages=(),
        imports=metadata.globals,
        values=len(metadata.values),
        notes=tuple(notes[:_MOST_NOTES]),
    )


def _size(path: str, name: str) -> int | None:
    try:
        return os.stat(os.path.join(path, name)).st_size
    except FileNotFoundError:
        return None


def _hints(metadata: Metadata, files: int) -> list[str]:
    found = [f"torch.distributed.checkpoint, {len(metadata.items)} items in {files} file(s)"]
    if metadata.version:
        found.append(f"version {metadata.version}")
    if metadata.ours:
        found.append("written by fastserial")
    return found


def _entry(key: str, stored: Stored) -> TensorEntry:
    nbytes = prod(stored.shape) * ITEM_BYTES[stored.dtype]
    parts = len(stored.chunks)
    kind = "tensor" if parts == 1 else f"in {parts} parts"
    strides = contiguous_stride(stored.shape)
    return TensorEntry(key, stored.dtype, stored.shape, strides, None, 0, nbytes, kind)
