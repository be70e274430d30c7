"""Storage and planners for torch.distributed.checkpoint."""

from __future__ import annotations

from fastserial.distributed.dcp.load_planner import FastLoadPlanner
from fastserial.distributed.dcp.save_planner import FastSavePlanner
from fastserial.distributed.dcp.storage_reader import FastStorageReader
from fastserial.distributed.dcp.storage_writer import FastStorageWriter

__all__ = ["FastLoadPlanner", "FastSavePlanner", "FastStorageReader", "FastStorageWriter"]
