"""A rank of two: `async_save` of what is changed as soon as it returns. Argument: folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import join
from torch.distributed.checkpoint import staging
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fastserial.distributed import (
    FastLoadPlanner,
    FastSavePlanner,
    FastStorageReader,
    FastStorageWriter,
)


def main() -> None:
    rank, count = join()
    folder = Path(sys.argv[1])
    mesh = DeviceMesh("cpu", torch.arange(count))
    group: Any = dist.new_group(list(range(count)))
    model = torch.nn.Linear(700, 300)
    optimizer = torch.optim.AdamW(model.parameters())
    shard = torch.zeros(1 << 18)
    scalar = torch.zeros(())
    state: dict[str, Any] = {
        "model": model,
        "shard": DTensor.from_local(shard, mesh, [Shard(0)]),
        "scalar": DTensor.from_local(scalar, mesh, [Replicate()]),
        "plain": torch.zeros(1000),
    }
    tensors = [shard, scalar, state["plain"], *(p.data for p in model.parameters())]
    stagers: list[Any] = [None]
    if hasattr(staging, "DefaultStager"):
        options = staging.StagingOptions(False, False, True, False)
        stagers.append(staging.DefaultStager(options))
    for number, stager in enumerate(stagers):
        path = folder / str(number)
        for step in range(1, 4):
            for tensor in tensors:
                tensor.fill_(step)
            more = {"async_stager": stager} if stager is not None else {}
            answer = dcp.async_save(
                state,
                storage_writer=FastStorageWriter(path),
                planner=FastSavePlanner(),
                process_group=group,
                **more,
            )
            done = getattr(answer, "upload_completion", answer)
            staged = getattr(answer, "staging_completion", None)
            if staged is not None:
                staged.result()
            for tensor in tensors:
                tensor.fill_(-1)
            done.result()
            found = {key: state[key] for key in state}
            dcp.load(found, storage_reader=FastStorageReader(path), planner=FastLoadPlanner())
            assert all(bool(torch.all(tensor == step)) for tensor in tensors), (number, step)
        if stager is not None:
            stager.close()
    del optimizer
    print(len(stagers) > 1, rank)


main()
