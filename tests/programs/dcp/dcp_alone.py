"""A rank of two, each with a checkpoint of its own in one folder. Argument: folder."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.ranks import join

from fastserial.distributed import (
    FastLoadPlanner,
    FastSavePlanner,
    FastStorageReader,
    FastStorageWriter,
)


def state_of(rank: int, step: int) -> dict[str, Any]:
    return {
        "same": torch.full((300_000,), float(step)),
        "mine": torch.full((5,), float(rank + 10 * step)),
        f"of {rank}": torch.full((2, 3), step),
        "step": step,
    }


def main() -> None:
    rank, _ = join()
    path = sys.argv[1]
    warnings.simplefilter("ignore")
    for step in (1, 2, 3):
        writer = FastStorageWriter(path)
        planner = FastSavePlanner() if step != 2 else None
        dcp.save(
            state_of(rank, step), storage_writer=writer, planner=planner, use_collectives=False
        )
        dist.barrier()
        readers: list[Any] = [FastStorageReader(path)]
        readers.append(dcp.FileSystemReader(path))
        for reader in readers:
            for load_planner in (None, FastLoadPlanner()):
                found = state_of(rank, 0)
                dcp.load(found, storage_reader=reader, planner=load_planner)
                expected = state_of(rank, step)
                assert found.pop("step") == expected.pop("step")
                assert all(torch.equal(found[key], expected[key]) for key in expected)
        dist.barrier()


main()
