"""A rank: one of them dies or stops halfway. Arguments: a folder, `die` or `stop`.

The others print what they were told, and how long it took.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.ranks import join

from fastserial.distributed import load
from fastserial.distributed.onefile import flow
from fastserial.errors import DistributedError


def main() -> None:
    rank, count = join()
    path, how = Path(sys.argv[1]) / "state.pt", sys.argv[2]
    if rank == 0:
        torch.save({"a": torch.arange(200_000)}, path)
    dist.barrier()
    into = {"a": torch.zeros(200_000, dtype=torch.int64)}
    load(path, into, timeout=60)  # so that all connections are there
    turn = flow.Flow._round
    lost = Path(sys.argv[1]) / "lost"

    def ending(self: flow.Flow, number: int, *rest: Any) -> None:
        if rank == count - 1 and number == 1:
            lost.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL if how == "die" else signal.SIGSTOP)
        turn(self, number, *rest)

    with (
        mock.patch.object(flow, "_LARGEST_WINDOW", 64 * 1024),
        mock.patch.object(flow.Flow, "_round", ending),
    ):
        began = time.monotonic()
        try:
            load(path, into, timeout=5)
        except DistributedError as error:
            print(f"{error.rank}|{time.monotonic() - began}|{error}", flush=True)
    (lost.parent / f"heard{rank}").touch()
    if rank == 0 and how == "stop":
        while not all((lost.parent / f"heard{other}").exists() for other in range(count - 1)):
            time.sleep(0.02)
        os.kill(int(lost.read_text()), signal.SIGKILL)
    os._exit(0)  # the job's own group has lost a rank


main()
