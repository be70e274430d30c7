"""What `.metadata` says of an item: where it lies, and, of ours, what is in it.

The class is stock's, so that stock reads it; what we know besides is one more attribute of plain
values, which stock ignores.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo

from fastserial.formats.dcp import Known

__all__ = ["known_of", "place_of"]

_ATTRIBUTE = "fastserial"


def place_of(file: str, offset: int, length: int, known: Known) -> Any:
    """Return what `.metadata` keeps of an item: `length` bytes at `offset` of a file."""
    place = _StorageInfo(file, offset, length)
    with contextlib.suppress(AttributeError):  # a torch whose class takes no more
        setattr(place, _ATTRIBUTE, tuple(known))
    return place


def known_of(place: Any) -> Known | None:
    """Return what the writer knew, None if it was not ours."""
    found = getattr(place, _ATTRIBUTE, None)
    return Known(*found) if isinstance(found, tuple) and len(found) == len(Known._fields) else None
