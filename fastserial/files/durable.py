"""Small files and folders, written durably: they mark a checkpoint as complete."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from fastserial.errors import WriteError, write_error
from fastserial.files import linux
from fastserial.files.destination import StockWay, open_path
from fastserial.interrupts import Descriptors, ours, suppress

# Some file systems cannot sync a directory; their metadata is synchronous, or without a guarantee.
_CANNOT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.EPERM)


def replace_bytes(path: str, data: bytes, durable: bool = True) -> None:
    """Replace a file as a whole: readers see the old bytes or the new ones.

    Where no file can be replaced it is overwritten.

    Args:
        durable: sync the file and its directory.

    Raises:
        WriteError: the file cannot be written.
    """
    try:
        file = open_path(path, durable)
        if isinstance(file, StockWay):
            _overwrite(path, data, durable)
            return
        try:
            linux.write_all(file.fd, memoryview(data), 0)
            file.sync()
            file.commit()
        except BaseException:
            file.discard()
            raise
    except WriteError:
        raise
    except ours(OSError) as error:
        raise write_error(error.errno or errno.EIO, path, error.strerror) from error


def _overwrite(path: str, data: bytes, durable: bool) -> None:
    is_new = not os.path.lexists(path)
    try:
        with open(path, "wb", buffering=0) as file:
            linux.write_all(file.fileno(), memoryview(data), 0)
            if durable:
                linux.synced(file.fileno())
    except BaseException:
        if is_new:  # a part of it would be taken for the whole file
            with suppress(OSError):
                os.unlink(path)
        raise


def make_folder(path: str, durable: bool) -> None:
    """Create a folder and its parents, if they do not exist.

    Args:
        durable: make the names of the new ones durable.

    Raises:
        WriteError: it cannot be created.
    """
    missing: list[str] = []
    at = os.path.realpath(path)  # the parent of "link/.." is elsewhere
    while not os.path.isdir(at) and at != os.path.dirname(at):
        missing.append(at)
        at = os.path.dirname(at)
    if not missing:
        return
    try:
        os.makedirs(path, exist_ok=True)
        if durable:
            sync_folders(missing)
    except ours(OSError) as error:
        text = f"the folder cannot be created: {error.strerror}"
        raise write_error(error.errno or errno.EIO, path, text) from error


def sync_folders(folders: Iterable[str]) -> None:
    """Make the names in folders durable, and the folders' own names.

    Raises:
        OSError: the disk failed.
    """
    wanted = {os.path.realpath(folder) for folder in folders}  # "link/.." is elsewhere
    for folder in wanted | {os.path.dirname(folder) for folder in wanted}:
        with Descriptors() as files:
            try:
                os.fsync(files.open(folder, os.O_RDONLY | os.O_DIRECTORY))
            except ours(OSError) as error:
                if error.errno not in _CANNOT:
                    raise
