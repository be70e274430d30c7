"""Opening a checkpoint to read its tensors one by one, without executing its pickle."""

from __future__ import annotations

from torch.serialization import LoadEndianness, get_default_load_endianness

from fastserial.errors import (
    CheckpointFileError,
    UnreadableCheckpointError,
    UnreadableTensorError,
)
from fastserial.formats.container import Container, ZipContainer, open_container
from fastserial.formats.zip.records import PICKLE

__all__ = ["is_little_endian", "open_readable"]


def open_readable(fd: int, path: str) -> Container:
    """Return what an open checkpoint says of itself, its tensors included.

    Args:
        fd: its descriptor; positions are not used.
        path: its name, for errors.

    Raises:
        CorruptCheckpointError: the file is damaged.
        UnreadableCheckpointError: the file is no checkpoint.
        UnreadableTensorError: it was written on a big-endian machine.
        PickleLimitError: its pickle is larger than the limits.
        OSError: it cannot be read.
    """
    container = open_container(fd, path)
    try:
        if isinstance(container, ZipContainer) and container.directory.find(PICKLE) is None:
            text = "the archive holds no data.pkl: not a checkpoint of torch.save"
            raise UnreadableCheckpointError(text)
        if not is_little_endian(container):
            text = "the file was written on a big-endian machine: use torch.load"
            raise UnreadableTensorError(text)
        container.keys()  # reads the pickle
    except CheckpointFileError as error:
        error.path = error.path or path
        raise
    return container


def is_little_endian(container: Container) -> bool:
    """Return whether `torch.load` takes the storages of a file for little-endian.

    Raises:
        CorruptCheckpointError: the record that says so is damaged.
        OSError: it cannot be read.
    """
    order = container.byte_order
    if order is None:
        return get_default_load_endianness() is not LoadEndianness.BIG
    return order == "little"
