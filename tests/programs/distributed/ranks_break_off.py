"""A rank of two: the first fails while the other is in the middle of receiving from it.

gloo would let the other one wait until the timeout.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from support.ranks import join

from fastserial.distributed.ranks.group import traffic_of
from fastserial.errors import DistributedError

SIZE = 512 << 20  # bytes: no buffer of the system takes as much


def main() -> None:
    rank, _ = join()
    traffic = traffic_of(None, 60)
    began = time.monotonic()
    try:
        with traffic.together():
            data = torch.full((SIZE,), 7 * (1 - rank), dtype=torch.uint8)
            if rank == 0:
                traffic.receive(1, data[:1])()  # the other one is there
                traffic.send(1, data)
                time.sleep(0.01)  # it has begun
                raise OSError("the disk broke")
            traffic.send(0, data[:1])()
            traffic.receive(0, data)()
            assert data[-1] == 7
            traffic.receive(0, data)()
    except DistributedError as error:
        soon = time.monotonic() - began < traffic.timeout / 2
        print(error.rank, "the disk broke" in str(error), soon)
    dist.barrier()  # the end of the process would end the other one's wait


main()
