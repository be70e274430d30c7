"""Telling what a folder of torch.distributed.checkpoint holds."""

from __future__ import annotations

import os
from math import prod

from fastserial.checkpoints.dcp_folder import all_metadata, list_folder
from fastserial.checkpoints.inspection import Inspection
from fastserial.formats.dcp import Stored
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
    found = all_metadata(path)
    several = len(found) > 1
    items = [item for metadata in found.values() for item in metadata.items]
    needed = dict.fromkeys(item.file for item in items)
    sizes = {name: _size(path, name) for name in (*listed.metadata, *listed.shards)}
    notes = [f"{len(found)} ranks, each with a checkpoint of its own"] if several else []
    notes += [f"{key}: it has no place" for one in found.values() for key in one.missing]
    notes += [f"{name}: the file is missing" for name in needed if sizes.get(name) is None]
    spare = [name for name in listed.shards if name not in needed]
    notes += [f"{name}: it belongs to no checkpoint that torch loads" for name in spare]
    tensors: list[TensorEntry] = []
    for name, metadata in found.items():
        of = f", in {name}" if several else ""  # ranks on their own may have the same keys
        for key, stored in metadata.tensors.items():
            if stored.dtype in ITEM_BYTES:
                tensors.append(_entry(key, stored, of))
            else:
                text = f"torch has no dtype {stored.dtype} that is known here"
                notes.append(f"tensor {key}{of}: {text}")
    return Inspection(
        path=path,
        format="dcp",
        bytes=sum(size or 0 for size in sizes.values()),
        archive_name=None,
        records=tuple((f"{item.file}: {item.name}", item.offset, item.length) for item in items),
        tensors=tuple(tensors),
        storages=(),
        imports=tuple(sorted({name for one in found.values() for name in one.globals})),
        values=sum(len(one.values) for one in found.values()),
        notes=tuple(notes[:_MOST_NOTES]),
    )


def _size(path: str, name: str) -> int | None:
    try:
        return os.stat(os.path.join(path, name)).st_size
    except FileNotFoundError:
        return None


def _entry(key: str, stored: Stored, of: str) -> TensorEntry:
    nbytes = prod(stored.shape) * ITEM_BYTES[stored.dtype]
    parts = len(stored.chunks)
    kind = ("tensor" if parts == 1 else f"in {parts} parts") + of
    strides = contiguous_stride(stored.shape)
    return TensorEntry(key, stored.dtype, stored.shape, strides, None, 0, nbytes, kind)
