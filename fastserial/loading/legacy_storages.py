"""The storages of a legacy checkpoint, read into the memory that torch allocated for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastserial.errors import CorruptCheckpointError, UnreadableCheckpointError
from fastserial.formats.legacy.layout import COUNT
from fastserial.loading.reader import FastFileReader
from fastserial.loading.sinks import BytesSink, ReadExtent, storage_sink
from fastserial.memory.devices import has_streams
from fastserial.memory.huge_pages import HugePages
from fastserial.memory.storages import is_on_host


def read_storages(
    reader: FastFileReader, storages: Mapping[Any, Any], keys: Sequence[Any], offset: int
) -> int:
    """Fill the storages, which are in the file in the order of `keys`, each after its count.

    Args:
        reader: the file.
        storages: typed storages by key.
        keys: keys in the order of the file.
        offset: where the first count is (bytes).

    Returns:
        The first byte after the last storage.

    Raises:
        CorruptCheckpointError: the file is not as the pickle says; torch's own reader says what.
        UnreadableCheckpointError: storages are on devices that we do not fill.
        OSError: the disk failed.
    """
    if len(set(keys)) != len(keys) or not all(key in storages for key in keys):
        raise CorruptCheckpointError("the list of storages is damaged")
    untyped = [storages[key]._untyped_storage for key in keys]
    if not all(is_on_host(storage) or has_streams(storage.device) for storage in untyped):
        raise UnreadableCheckpointError("storages on other devices are torch's to read")
    reader.attend(untyped)
    extents: list[ReadExtent] = []
    counts: list[tuple[BytesSink, bytes]] = []  # what is read, and what the pickle says
    host: list[tuple[int, int]] = []
    for key, storage in zip(keys, untyped, strict=True):
        nbytes, item = storage.nbytes(), storages[key].dtype.itemsize
        count = BytesSink(COUNT.size)
        counts.append((count, COUNT.pack(nbytes // item)))
        extents.append(ReadExtent(offset, COUNT.size, count))
        offset += COUNT.size
        if nbytes:
            if is_on_host(storage):
                host.append((storage.data_ptr(), nbytes))
            extents.append(ReadExtent(offset, nbytes, storage_sink(storage, reader.ring)))
            offset += nbytes
    HugePages().advise_all(host)
    reader.read_into(extents)
    if any(count.data != expected for count, expected in counts):
        raise CorruptCheckpointError("the size of a storage is not what the pickle says")
    return offset
