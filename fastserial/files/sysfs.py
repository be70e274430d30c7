"""What the kernel says of devices, in the files of sysfs."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["block_node", "first_line"]

_BLOCK_DEVICES = Path("/sys/dev/block")


def block_node(number: int) -> Path | None:
    """Return the folder in sysfs of a block device; None for what is on none (tmpfs, NFS)."""
    link = _BLOCK_DEVICES / f"{os.major(number)}:{os.minor(number)}"
    try:
        return link.resolve(strict=True)
    except OSError:
        return None


def first_line(path: Path) -> str:
    """Return the text of a file in sysfs, empty where there is none."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
