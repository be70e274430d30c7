"""Many ranks, one file."""

from __future__ import annotations

from fastserial.distributed.flat_shard import FlatShard

__all__ = ["FlatShard"]
