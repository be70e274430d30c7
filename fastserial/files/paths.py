"""Paths that stay what they are when the process changes its directory."""

from __future__ import annotations

import os

from fastserial.interrupts import ours

_MOST_NBYTES = 4096  # of a path, as the kernel takes it


def absolute(path: str) -> str:
    """Return a path that leads to the same file from any directory.

        folder = absolute("run")  # before anything that comes later, perhaps in another thread

    Unlike `os.path.abspath` it leaves `..` to the kernel, which follows links first.

    Returns:
        The path as it was given, if the current directory has no usable path: it was removed, is
        too deep, or is below one that this user may not search.
    """
    if not path or path.startswith("/"):
        return path
    try:
        here = os.getcwd()
        found = os.path.join(here, path)
        is_usable = os.path.samefile(here, os.curdir)
    except ours(OSError):
        return path
    return found if is_usable and len(os.fsencode(found)) < _MOST_NBYTES else path
