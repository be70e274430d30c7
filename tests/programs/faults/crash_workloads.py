"""A rank: runs workloads of `workloads.py`, one after the other. Argument: a JSON object.

`root` is the folder of all, `names` are the workloads; `marks`, if it is given, a file that is told
how far it is got: else a trace is. It prepares all, prints `ready`, and waits for SIGUSR1.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from support.ranks import join
from support.traced_calls import mark
from workloads import ALL, OPTIONS, folder_name

import fastserial


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])  # in the threads of `join`, too
    torch.set_num_threads(1)
    job = json.loads(sys.argv[1])
    ranks = int(os.environ["WORLD_SIZE"])
    rank = int(os.environ["RANK"])
    if ranks > 1:
        join()
    fastserial.install()

    def together() -> None:
        if ranks > 1:
            dist.barrier()

    def tell(text: str) -> None:
        if not job["marks"]:
            mark(text)
        elif rank == 0 or text.startswith("returned"):
            Path(job["marks"]).write_text(text)

    root = Path(job["root"])
    for name in job["names"]:
        folder = root / folder_name(name)
        if rank == 0:
            folder.mkdir()
        together()
        with fastserial.options(**{**OPTIONS, **ALL[name].options}):
            ALL[name].prepare(folder)
        together()
    os.write(1, b"ready\n")
    signal.sigwait([signal.SIGUSR1])
    for name in job["names"]:
        folder = root / folder_name(name)
        together()
        if job["marks"] and rank == 0:
            os.sync()
        if rank == 0:
            tell(f"begin {name}")
        together()
        with fastserial.options(**{**OPTIONS, **ALL[name].options}):
            ALL[name].act(folder)
        tell(f"returned {name}")
        together()
        if rank == 0:
            if job["marks"]:
                os.sync()
            tell(f"end {name}")
        together()


main()
