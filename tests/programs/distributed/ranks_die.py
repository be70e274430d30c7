"""A rank: saves again and again until another one is killed. Arguments: folder, timeout.

In the file `flags` of the folder it says, a byte for each rank, that it is in a save.
"""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path

import torch
from support.ranks import join
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fastserial import distributed
from fastserial.errors import DistributedError


def main() -> None:
    rank, count = join()
    folder, timeout = Path(sys.argv[1]), float(sys.argv[2])
    with (folder / "flags").open("r+b") as file:
        flags = mmap.mmap(file.fileno(), count)
    mesh = DeviceMesh("cpu", torch.arange(count))
    rows = torch.zeros(1 << 18, 4)
    columns = torch.zeros(1 << 20, 4 // count if 4 % count == 0 else 1)
    state = {
        "rows": DTensor.from_local(rows, mesh, [Shard(0)], run_check=False),
        "columns": DTensor.from_local(columns, mesh, [Shard(1)], run_check=False),
        "all": torch.zeros(1 << 20),
    }
    while True:
        state["step"] = int(state.get("step", 0)) + 1
        for tensor in (rows, columns, state["all"]):
            tensor += 1
        began = time.monotonic()
        try:
            flags[rank] = 1
            distributed.save(state, folder / "out" / "file.pt", timeout=timeout)
            flags[rank] = 0
        except DistributedError as error:
            print(error.rank, time.monotonic() - began)
            return


main()
