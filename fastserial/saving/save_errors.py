"""What a failed system call means for a save: what is left at the path, and what to do."""

from __future__ import annotations

import errno
import os

from fastserial.errors import REMEDIES, WriteError, write_error
from fastserial.files.in_place import Destination
from fastserial.files.targets import FileTarget, PathTarget, Target, free_bytes_for

__all__ = ["save_error"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def save_error(
    error: OSError,
    target: Target,
    destination: Destination | None,
    needed: int | None,
) -> WriteError:
    """Return the error of a save.

    Args:
        error: of the system call.
        target: what is saved to.
        destination: where it goes, None if that could not be opened.
        needed: bytes of the whole save, None if that is not known.
    """
    number = error.errno or errno.EIO
    text = error.strerror or str(error)
    free = None
    if number not in _FULL:
        needed = None
    else:
        free = free_bytes_for(target, destination.fd if destination is not None else -1)
        if needed is not None:
            text += f" (the save needs {needed} bytes"
            text += f", {free} are free)" if free is not None else ")"
    replaces = isinstance(target, PathTarget)
    if number == errno.ENOENT and replaces and destination is not None:
        text = "the directory was removed during the save"
    if destination is not None:
        outcome = destination.outcome
    else:
        is_new = not isinstance(target, FileTarget) and not os.path.exists(target.name)
        outcome = "no file was made" if is_new else "the previous file is intact"
    text += f"; {outcome}"
    if number in REMEDIES:
        text += f". {REMEDIES[number]}"
    found = write_error(number, target.name, text)
    found.bytes_needed, found.bytes_free = needed, free
    return found
