"""A rank that trains on a shuffled stream of data: `FOLDER STEPS [CONTROL]`.

Prints the batch of each step. Started again, it goes on from the newest checkpoint; CONTROL leaves
the data loader out of it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from support.ranks import join
from torch import nn
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import fastserial


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Numbers of this rank, in another order in each epoch; it knows where it is."""

    def __init__(self, rank: int, count: int) -> None:
        self.mine = torch.arange(rank, 64, count)
        self.epoch, self.at, self.resumed = 0, 0, False

    def __iter__(self) -> Any:
        if not self.resumed:
            self.at = 0
        self.resumed = False
        order = torch.randperm(len(self.mine), generator=torch.Generator().manual_seed(self.epoch))
        while self.at < len(order):
            self.at += 1
            yield self.mine[order[self.at - 1]]
        self.epoch, self.at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.at, self.resumed = state["epoch"], state["at"], True


def main() -> None:
    rank, count = join()
    folder, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = nn.Linear(8, 8)
    loader: Any = StatefulDataLoader(Stream(rank, count), batch_size=4, num_workers=0)
    each = {"loader": loader} if len(sys.argv) < 4 else {}
    batches = None
    with fastserial.Checkpointer(
        folder, {"model": model}, per_rank=each, keep=2, every=3, timeout=60
    ) as checkpointer:
        start = checkpointer.resume()
        print("start", start, flush=True)
        for step in range(start + 1, steps + 1):
            batch = next(batches, None) if batches is not None else None
            while batch is None:  # twice, if it resumes where an epoch has ended
                batches = iter(loader)
                batch = next(batches, None)
            print(step, *batch.tolist(), flush=True)
            checkpointer.save(step)
            dist.barrier()


main()
