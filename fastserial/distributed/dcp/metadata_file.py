"""`.metadata`: a pickle that stock reads, with a checksum behind it; or, packed, ours.

Unpickling stops at the end of the pickle, so stock does not see what follows.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata

from fastserial.formats.dcp import framed, unframed
from fastserial.memory.held_settings import paused_collection

__all__ = ["Encoded", "decoded", "encoded"]


class Encoded(NamedTuple):
    """The contents of the file, and the pickle that is in it."""

    contents: bytes
    pickled: bytes


def encoded(metadata: Metadata, packed: bool) -> Encoded:
    """Return the contents of the file."""
    files = sorted({place.relative_path for place in (metadata.storage_data or {}).values()})
    with paused_collection():
        pickled = pickle.dumps(metadata)
    return Encoded(framed(pickled, packed, files), pickled)


def decoded(data: bytes, path: str) -> Metadata | None:
    """Return what the packed file says; None for one that stock reads, which is not damaged then.

    Raises:
        CorruptCheckpointError: the checksum is not that of the contents.
    """
    found = unframed(data, path)
    if not found.packed:
        return None
    with paused_collection():
        value: Any = pickle.loads(found.pickled)
    return value if isinstance(value, Metadata) else None
