"""Devices, pipes and open descriptors at a path: written to, never replaced by a file.

safetensors (since 0.8) and Lightning rename a new file over whatever is at the path. As root that
makes a file of `/dev/null`, for the whole machine.
"""

from __future__ import annotations

import os
import stat
from io import BufferedWriter

from fastserial.files import linux
from fastserial.interrupts import ours

_MAX_LINKS = 40  # as the kernel's own limit


def is_node(path: str | os.PathLike[str]) -> bool:
    """Return whether a path leads to a device, a pipe, a socket, or an open descriptor.

        is_node("/dev/null"), is_node("/dev/stdout")  # True, True

    Symbolic links are followed.
    """
    try:
        mode = os.stat(path).st_mode
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or _is_descriptor(os.fspath(path))
    except ours(OSError, ValueError):  # nothing is there, or it is not a path
        return False


def _is_descriptor(path: str) -> bool:
    for _ in range(_MAX_LINKS):
        where = os.path.dirname(path) or os.curdir
        if linux.magic_of(where) == linux.PROC:
            return True
        if not os.path.islink(path):
            break
        path = os.path.join(where, os.readlink(path))
    return False


def open_node(path: str | os.PathLike[str]) -> BufferedWriter:
    """Open what is at a path for writing; nothing is created.

    Raises:
        OSError: it cannot be opened.
    """
    return open(path, "wb", opener=lambda name, flags: os.open(name, flags & ~os.O_CREAT))
