"""Many ranks, one file."""

from __future__ import annotations

from fastserial.distributed.beside import save_async
from fastserial.distributed.flat_shard import FlatShard
from fastserial.distributed.loader import load
from fastserial.distributed.saver import save

__all__ = ["FlatShard", "load", "save", "save_async"]
