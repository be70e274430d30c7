"""Storage and planners for torch.distributed.checkpoint."""

from __future__ import annotations

# A program that ends right after a collective of torch's may end by SIGABRT: a thread of gloo's
# lets go of a tensor once the interpreter is gone (torch 2.13). Where torch imported this in the
# middle of a save, 4 of 5 runs ended so; with this line 2 of 12. `gc.collect()` helps.
import torch.distributed.tensor  # noqa: F401

from fastserial.distributed.dcp.planners import FastLoadPlanner, FastSavePlanner
from fastserial.distributed.dcp.storage_reader import FastStorageReader
from fastserial.distributed.dcp.storage_writer import FastStorageWriter

__all__ = ["FastLoadPlanner", "FastSavePlanner", "FastStorageReader", "FastStorageWriter"]
