"""A rank of three: 1 fails, and 0 comes when that is over. Argument: folder.

Rank 2 waits for rank 0 by then, over connections of the save before.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from support.ranks import join

from fastserial import DistributedError, distributed


def main() -> None:
    rank, _ = join()
    path = Path(sys.argv[1]) / "f.pt"
    state: object = {"x": torch.ones(1000)}
    distributed.save(state, path)
    if rank == 0:
        time.sleep(1)
    nameless = torch.optim.SGD([torch.ones(3, requires_grad=True)])
    try:
        distributed.save(nameless if rank == 1 else state, path)
    except DistributedError as error:
        print(error.rank)
    dist.barrier()  # nothing of fastserial ends the wait
    distributed.save(state, path)


main()
