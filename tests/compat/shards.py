"""Folders of shards: ``python shards.py FOLDER stock|fast write|read``.

Prints, as JSON, the digest of each value by its key.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed.checkpoint as dcp
from support.identity import digest

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8)
SHAPES = {"large": (700, 1000), "small": (3, 5), "scalar": (), "empty": (0, 4)}


def state_of(blank: bool) -> dict[str, Any]:
    """A nested state, or one of the same shapes to load into."""
    generator = torch.Generator().manual_seed(0)
    model = {}
    for dtype in DTYPES:
        for name, shape in SHAPES.items():
            values = torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator)
            model[f"{name}.{dtype}"] = (values * (not blank)).to(dtype)
    model["turned"] = model["large.torch.float32"].t()  # not contiguous
    return {"model": model, "step": 0 if blank else 7, "names": [] if blank else ["a", "é"]}


def main(folder: str, side: str, mode: str) -> dict[str, str]:
    fast = side == "fast"
    if fast:
        from fastserial.distributed import (
            FastLoadPlanner,
            FastSavePlanner,
            FastStorageReader,
            FastStorageWriter,
        )
    state = state_of(mode == "read")
    if mode == "write":
        writer = FastStorageWriter(folder) if fast else dcp.FileSystemWriter(folder)
        dcp.save(state, storage_writer=writer, planner=FastSavePlanner() if fast else None)
    else:
        reader = FastStorageReader(folder) if fast else dcp.FileSystemReader(folder)
        dcp.load(state, storage_reader=reader, planner=FastLoadPlanner() if fast else None)
    found = {key: digest(value) for key, value in state["model"].items()}
    return {**found, "step": repr(state["step"]), "names": repr(state["names"])}


if __name__ == "__main__":
    print(json.dumps({"torch": torch.__version__, "values": main(*sys.argv[1:])}))
