"""`.metadata`: a pickle that stock reads, with what our writer knows of each item, and a checksum.

The checksum is behind the pickle, where unpickling does not look.
"""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from fastserial.formats.dcp import Known, framed
from fastserial.memory.held_settings import paused_collection

__all__ = ["encoded", "known_of", "storage_info"]

_ATTRIBUTE = "fastserial"


def storage_info(file: str, offset: int, length: int, known: Known | None) -> Any:
    """Return what `.metadata` keeps of an item: `length` bytes at `offset` of a file."""
    info = _StorageInfo(file, offset, length)
    if known is not None:
        with contextlib.suppress(AttributeError):  # a torch whose class takes no more
            setattr(info, _ATTRIBUTE, tuple(known))
    return info


def known_of(info: Any) -> Known | None:
    """Return what the writer knew of an item, None if it was not ours."""
    found = getattr(info, _ATTRIBUTE, None)
    return Known(*found) if isinstance(found, tuple) and len(found) == len(Known._fields) else None


def encoded(metadata: Metadata) -> bytes:
    """Return the contents of the file."""
    with paused_collection():
        return framed(pickle.dumps(metadata))
