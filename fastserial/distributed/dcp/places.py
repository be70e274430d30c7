"""What `.metadata` says of an item: where it lies, and, of ours, what is in it.

The class is stock's, so that stock reads it; what we know besides is one more attribute of plain
values, which stock ignores.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo

from fastserial.formats.dcp import Known

__all__ = ["is_ours", "known_of", "noted_in", "place_of"]

_ATTRIBUTE = "fastserial"
_OURS = {*vars(_StorageInfo("", 0, 0)), _ATTRIBUTE}


def place_of(file: str, offset: int, length: int, known: tuple[Any, ...] | None) -> Any:
    """Return what `.metadata` keeps of an item: `length` bytes at `offset` of a file.

    Args:
        known: the values of a `Known`.
    """
    place = _StorageInfo(file, offset, length)
    if known is not None:
        with contextlib.suppress(AttributeError):  # a torch whose class takes no more
            setattr(place, _ATTRIBUTE, known)
    return place


def is_ours(place: Any) -> bool:
    """Return whether there is nothing in a place but what `place_of` puts there."""
    if type(place) is not _StorageInfo or getattr(place, "transform_descriptors", None):
        return False
    return vars(place).keys() <= _OURS


def noted_in(place: Any) -> tuple[Any, ...] | None:
    """Return the values of the `Known` that is in a place of ours, None if there is none."""
    return getattr(place, _ATTRIBUTE, None)


def known_of(place: Any) -> Known | None:
    """Return what the writer knew, None if it was not ours."""
    found = noted_in(place)
    return Known(*found) if isinstance(found, tuple) and len(found) == len(Known._fields) else None
