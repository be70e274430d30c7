"""Storage and planners for torch.distributed.checkpoint."""

from __future__ import annotations

# torch imports it in the middle of a save: with torch 2.13 and gloo, programs without DTensors
# ended by SIGABRT then: "terminate called without an active exception".
import torch.distributed.tensor  # noqa: F401

from fastserial.distributed.dcp.load_planner import FastLoadPlanner
from fastserial.distributed.dcp.save_planner import FastSavePlanner
from fastserial.distributed.dcp.storage_reader import FastStorageReader
from fastserial.distributed.dcp.storage_writer import FastStorageWriter

__all__ = ["FastLoadPlanner", "FastSavePlanner", "FastStorageReader", "FastStorageWriter"]
