"""Symbolic links in the place of a file that is to be written."""

from __future__ import annotations

import contextlib
import os

__all__ = ["part_from_link"]


def part_from_link(path: str) -> None:
    """Make a name a file of its own, if it is a link: what it leads to is not to be replaced.

    So do writers that rename a new file over the name: Lightning (`last.ckpt` may be a link to
    another checkpoint) and safetensors. The name leads to the same bytes until it is replaced.

    Raises:
        OSError: the link cannot be removed.
    """
    if not os.path.islink(path):
        return
    folder, name = os.path.split(path)
    beside = os.path.join(folder, f".{name[:200]}.{os.getpid()}.fastserial")
    try:
        os.link(os.path.realpath(path), beside)
        os.replace(beside, path)
    except OSError:  # it leads nowhere, or to another file system
        with contextlib.suppress(OSError):
            os.unlink(beside)
        os.unlink(path)
