"""Small text files and folders, made durable: what marks a checkpoint as there for others."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from fastserial.errors import write_error
from fastserial.files.in_place import InPlaceFile, open_target
from fastserial.files.targets import StockWay, path_target
from fastserial.interrupts import Descriptors

__all__ = ["replace_bytes", "replace_text", "sync_folders"]

# Some file systems cannot sync a directory; their metadata is synchronous or promised by nothing.
_CANNOT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EACCES, errno.EPERM)


def replace_text(path: str, text: str) -> None:
    """Replace a text file as a whole and durably: readers see the old text or the new one.

    Where no file can be replaced, it is overwritten.

    Raises:
        WriteError: the file cannot be written.
    """
    replace_bytes(path, text.encode())


def replace_bytes(path: str, data: bytes, durable: bool = True) -> None:
    """Replace a file as a whole: readers see the old bytes or the new ones.

    Where no file can be replaced, it is overwritten.

    Args:
        durable: sync the file and its directory.

    Raises:
        WriteError: the file cannot be written.
    """
    target = path_target(path)
    if isinstance(target, StockWay):
        raise write_error(errno.EINVAL, path, target.reason)
    try:
        file = open_target(target, durable=durable)
        try:
            if isinstance(file, InPlaceFile):
                file.begin()
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file.fd, rest) :]
            file.sync()
            file.commit()
        except BaseException:
            file.discard()
            raise
    except OSError as error:
        raise write_error(error.errno or errno.EIO, path, error.strerror) from error


def sync_folders(folders: Iterable[str]) -> None:
    """Make the names in folders durable, and the folders' own names.

    Raises:
        OSError: the disk failed.
    """
    wanted = {os.path.abspath(folder) for folder in folders}
    for folder in wanted | {os.path.dirname(folder) for folder in wanted}:
        with Descriptors() as files:
            try:
                os.fsync(files.open(folder, os.O_RDONLY | os.O_DIRECTORY))
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
