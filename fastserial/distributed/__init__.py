"""Many ranks, one file; and folders of shards, by torch.distributed.checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastserial.distributed.api import load, save
from fastserial.distributed.layout.flat_shard import FlatShard
from fastserial.distributed.save.background import save_async

if TYPE_CHECKING:
    from fastserial.distributed.dcp import (
        FastLoadPlanner,
        FastSavePlanner,
        FastStorageReader,
        FastStorageWriter,
    )

__all__ = [
    "FastLoadPlanner",
    "FastSavePlanner",
    "FastStorageReader",
    "FastStorageWriter",
    "FlatShard",
    "load",
    "save",
    "save_async",
]


def __getattr__(name: str) -> Any:
    if name in __all__:  # torch.distributed.checkpoint takes a while to import
        from fastserial.distributed import dcp

        return getattr(dcp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
