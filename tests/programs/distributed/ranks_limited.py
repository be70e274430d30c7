"""A rank under a limit of memory. Arguments: folder, tasks file of the group, bytes, budget or -.

Saves shards of a state of that many bytes, all ranks together, in the background, and changes them
meanwhile; prints the bytes copied at each of three calls.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from support.ranks import join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fastserial import distributed

_TENSORS, _COLUMNS = 16, 1024


def main() -> None:
    folder, tasks, nbytes, budget = sys.argv[1:]
    Path(tasks).write_text(str(os.getpid()))
    _, count = join()
    mesh = DeviceMesh("cpu", torch.arange(count))
    rows = int(nbytes) // (_TENSORS * 4 * _COLUMNS * count)
    state: dict[str, Any] = {
        str(number): DTensor.from_local(
            torch.full((rows, _COLUMNS), float(number)), mesh, [Shard(0)], run_check=False
        )
        for number in range(_TENSORS)
    }
    limit = None if budget == "-" else int(budget)
    for _ in range(3):
        saving = distributed.save_async(state, f"{folder}/state.pt", snapshot_budget=limit)
        for value in state.values():
            value.to_local().add_(1)
        report = saving.wait()
        assert report.snapshot is not None
        print(report.snapshot.copied)


main()
