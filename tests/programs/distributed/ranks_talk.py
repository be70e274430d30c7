"""A rank: messages, and failures while others wait. Arguments: case, and what it takes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from support.ranks import join

from fastserial import DistributedError, distributed
from fastserial.distributed.ranks.group import traffic_of

SIZE = 512 << 20  # bytes: no buffer of the system takes as much


def message(rank: int, length: int) -> bytes:
    return bytes((rank + index * 7) % 251 for index in range(length))


def lengths(rank: int, count: int, *texts: str) -> None:
    """Messages of these lengths to rank 0 and back, with signs of life in between."""
    numbers = [int(text) for text in texts]
    traffic = traffic_of(None, 60)
    for turn, length in enumerate(numbers):
        answer = numbers[-1 - turn]

        def decide(messages: list[bytes], length: int = length, answer: int = answer) -> bytes:
            assert messages == [message(other, length) for other in range(count)], length
            return message(9, answer)

        for _ in range(turn % 3):
            traffic._last_beat = -1000.0  # so that it is time for one
            traffic.alive()
        assert traffic.consult(message(rank, length), decide) == message(9, answer), length
    print(len(numbers))


def late(rank: int, count: int, folder: str) -> None:
    """Rank 1 fails, and 0 comes when that is over, for whom 2 waits over older connections."""
    path = Path(folder) / "f.pt"
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


def broken_off(rank: int, count: int) -> None:
    """Rank 0 fails in the middle of a message, of which gloo does not tell the other one."""
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


CASES = {case.__name__: case for case in (lengths, late, broken_off)}
CASES[sys.argv[1]](*join(), *sys.argv[2:])
