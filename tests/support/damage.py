"""Files that are not as they were written."""

from __future__ import annotations

from pathlib import Path

__all__ = ["flip"]


def flip(path: Path, at: int) -> None:
    """Flip a bit of a file's byte `at`."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))
