"""A rank: one of them is stopped, before its first or its second save, or while it writes.

Arguments: folder, the rank that is stopped, when. Rank 0 hosts the job's store, as without a
launcher. The others print whom the error names, and how long it took.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fastserial
from fastserial import distributed
from fastserial.engines.threads import ThreadsEngine
from fastserial.errors import DistributedError

TIMEOUT = 3.0


class Stopping(ThreadsEngine):
    """Stops the process in the middle of its writes."""

    name = "stopping"

    def submit(self, requests: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)


def join(folder: Path) -> int:
    """Meet over a `TCPStore` whose port rank 0 writes down."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = folder / "port"
    wait = timedelta(seconds=60)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, count, True, wait, wait_for_workers=False)
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), count, False, wait)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    return rank


def main() -> None:
    folder, victim, when = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    rank = join(folder)
    part = torch.full((1 << 20,), rank, dtype=torch.int32)
    count = dist.get_world_size()
    state: dict[str, Any] = {
        "x": distributed.FlatShard((count << 20,), part.dtype, rank << 20, 1 << 20, part),
        "step": 1,
    }
    if when != "first":
        distributed.save(state, folder / "x.pt", timeout=TIMEOUT)
    dist.barrier()
    options: dict[str, Any] = {}
    if rank == victim:
        if when == "writing":
            options = {"engine": Stopping, "small_file": 0}
        else:
            os.kill(os.getpid(), signal.SIGSTOP)
    state["step"] = 2
    began = time.monotonic()
    try:
        with fastserial.options(**options):
            distributed.save(state, folder / "x.pt", timeout=TIMEOUT)
    except DistributedError as error:
        print(error.rank, time.monotonic() - began, flush=True)
    # Who hosts the store must not end while others ask it.
    (folder / f"ended-{rank}").touch()
    until = time.monotonic() + 20
    while len(list(folder.glob("ended-*"))) < count - 1 and time.monotonic() < until:
        time.sleep(0.02)
    os._exit(0)


main()
