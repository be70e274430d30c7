"""A rank of two: `async_save` of what is changed as soon as it returns. Argument: folder.

By a thread, with a stager, and by a process of its own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import join
from torch.distributed.checkpoint import staging, state_dict_saver
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fastserial.distributed import (
    FastLoadPlanner,
    FastSavePlanner,
    FastStorageReader,
    FastStorageWriter,
)


def ways() -> list[dict[str, Any]]:
    """Return what `async_save` is told besides."""
    found: list[dict[str, Any]] = [{}]
    if hasattr(staging, "DefaultStager"):
        options = staging.StagingOptions(False, False, True, False)
        found.append({"async_stager": staging.DefaultStager(options)})
    if hasattr(state_dict_saver, "AsyncCheckpointerType"):  # since torch 2.7
        process = state_dict_saver.AsyncCheckpointerType.PROCESS
        found.append({"async_checkpointer_type": process})
    return found


def main() -> None:
    _, count = join()
    os.environ["MASTER_ADDR"] = "localhost"  # of the writing processes' own group
    folder = Path(sys.argv[1])
    mesh = DeviceMesh("cpu", torch.arange(count))
    group: Any = dist.new_group(list(range(count)))
    model = torch.nn.Linear(700, 300)
    shard, scalar = torch.zeros(1 << 18), torch.zeros(())
    state: dict[str, Any] = {
        "model": model,
        "shard": DTensor.from_local(shard, mesh, [Shard(0)]),
        "scalar": DTensor.from_local(scalar, mesh, [Replicate()]),
        "plain": torch.zeros(1000),
    }
    tensors = [shard, scalar, state["plain"], *(p.data for p in model.parameters())]
    for number, more in enumerate(ways()):
        path = folder / str(number)
        for step in range(1, 4):  # the third one by the plan that was kept
            for tensor in tensors:
                tensor.fill_(step)
            answer = dcp.async_save(
                state,
                storage_writer=FastStorageWriter(path),
                planner=FastSavePlanner(),
                process_group=group,
                **more,
            )
            done = getattr(answer, "upload_completion", answer)
            if hasattr(answer, "staging_completion"):
                answer.staging_completion.result()
            for tensor in tensors:
                tensor.fill_(-1)
            done.result()
            dcp.load(dict(state), storage_reader=FastStorageReader(path), planner=FastLoadPlanner())
            assert all(bool(torch.all(tensor == step)) for tensor in tensors), (number, step)
        if "async_stager" in more:
            more["async_stager"].close()


if __name__ == "__main__":  # a spawned process imports this
    main()
