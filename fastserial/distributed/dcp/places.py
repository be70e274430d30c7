"""What `.metadata` says of an item: where it lies, and, of ours, what is in it.

The class is stock's, so that stock reads it; what we know besides is one more attribute of plain
values, which stock ignores.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

from torch.distributed.checkpoint.filesystem import _StorageInfo

__all__ = ["Known", "known_of", "place_of"]

_ATTRIBUTE = "fastserial"


class Known(NamedTuple):
    """What the writer knew of an item.

    Attributes:
        start: where its bytes begin, from the item's first on; None: `torch.load` has to find out.
        crc: CRC-32 of the tensor's bytes, or without `start` of the whole item; None: not wanted.
        strides: of a tensor that is not contiguous.
    """

    start: int | None
    crc: int | None
    strides: tuple[int, ...] | None = None


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
