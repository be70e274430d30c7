"""`.metadata`: a pickle that stock reads, with a checksum behind it; or, packed, ours.

Unpickling stops at the end of the pickle, so stock does not see what follows.
"""

from __future__ import annotations

import pickle
import struct
import zlib
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from fastserial.checksums import crc32
from fastserial.errors import CorruptCheckpointError

__all__ = ["decoded", "encoded"]

_PACKED = b"fastserial packed checkpoint\n"
_MARK = b"fastserial"
_TRAILER = struct.Struct("<10sI")
_LEVEL = 6


def encoded(metadata: Metadata, packed: bool) -> bytes:
    """Return the contents of the file."""
    text = pickle.dumps(metadata)
    if packed:
        files = sorted({place.relative_path for place in (metadata.storage_data or {}).values()})
        names = "".join(f"{name}\n" for name in files).encode()
        text = b"".join((_PACKED, names, b"\n", zlib.compress(text, _LEVEL)))
    return text + _TRAILER.pack(_MARK, crc32(text))


def decoded(data: bytes, path: str) -> Metadata | None:
    """Return what the packed file says; None for one that stock reads, which is not damaged then.

    Raises:
        CorruptCheckpointError: the checksum is not that of the contents.
    """
    at = len(data) - _TRAILER.size
    mark, crc = _TRAILER.unpack_from(data, at) if at >= 0 else (b"", 0)
    if mark == _MARK and crc32(data[:at]) != crc:
        raise CorruptCheckpointError("damaged: its checksum is wrong", path=path)
    if not data.startswith(_PACKED):
        return None
    if mark != _MARK:
        raise CorruptCheckpointError("damaged: it has no checksum", path=path)
    start = data.index(b"\n\n") + 2
    found: Any = pickle.loads(zlib.decompress(data[start:at]))
    return found if isinstance(found, Metadata) else None
