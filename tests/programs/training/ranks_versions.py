"""A rank that saves modules with versions, in wrappers: `FOLDER [union]`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.own_loading import Versioned
from support.ranks import join
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastserial import Checkpointer, distributed


def wrapped() -> nn.Module:
    model = nn.Sequential(nn.Sequential(Versioned(2, 2), nn.BatchNorm1d(2)))
    nn.init.constant_(model[0][0].weight, 3.0)  # type: ignore[index, arg-type]
    model[0] = torch.compile(model[0], backend="eager")
    return DistributedDataParallel(model)


def main() -> None:
    folder, merge = Path(sys.argv[1]), sys.argv[2:] == ["union"]
    rank, _ = join()
    state: dict[str, Any] = {"m": wrapped()}
    if merge:
        state["stage"] = nn.ModuleDict({str(rank): nn.BatchNorm1d(4)})
        state["custom"] = nn.ModuleDict({str(rank): Versioned(2, 2)})
        for name in ("stage", "custom"):
            nn.init.constant_(state[name][str(rank)].weight, 3.0)
    made: dict[str, Any] = {"merge": "union"} if merge else {}
    with Checkpointer(folder, state, timeout=60, **made) as checkpointer:
        checkpointer.save(1)
    loads = [lambda: Checkpointer(folder, state, timeout=60, **made).resume()]
    if merge:
        path = folder / "whole.pt"
        distributed.save(state, path, timeout=60, merge="union")
        loads.append(lambda: distributed.load(path, state, timeout=60))
    for load in loads:
        for one in state.values():
            nn.init.zeros_(next(one.parameters()))
        load()
        for one in state.values():
            assert (next(one.parameters()) == 3.0).all()
    dist.barrier()


main()
